"""Which of the strategies of a cache step (`token_step`) a layer of a plan takes."""

from varjax.cache.stages import TokenPlan
from varjax.cache.token_offsets import OffsetStep
from varjax.cache.token_step import RingStep, StageStep, TokenStep


def token_step(plan: TokenPlan, layer: int, attention: str | None) -> TokenStep:
    """The strategy of a layer. attention: implementation of the kernel."""
    allocation, condition = plan.allocation, plan.sequence.condition
    # layers with equal numbers get equal strategies, and share one trace of the program
    slots = int(allocation.slots[layer])
    if plan.static_content:
        ring = condition, slots, allocation.protected, attention
        if allocation.reads is None:
            return RingStep(*ring)
        return OffsetStep(*ring, rule=plan.rule, reads=int(allocation.reads[layer]))
    # the period is the same in all layers, what they keep may differ
    main = slots - allocation.period  # the buffer is part of what the budget pays for
    return StageStep(
        rule=plan.rule,
        condition=condition,
        main=main,
        period=allocation.period,
        positions=condition + plan.sequence.steps + allocation.period,
        kept=main if allocation.kept is None else int(allocation.kept[layer]),
        group_stage=allocation.group_stage,
        queries_per_head=plan.geometry.queries_per_head,
        attention=attention,
    )
