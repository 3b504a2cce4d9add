"""How full a plan's tables are, for the estimates of our kernels (`pallas_kernels.estimates`)."""

from collections.abc import Sequence
from functools import singledispatch

from experiments.aot import per_token
from pallas_kernels.estimates import Occupancy
from varjax.cache.layer_inputs import write_table
from varjax.cache.plan import CachePlan
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.stages import TokenPlan
from varjax.engine.segments import Segment


@singledispatch
def plan_occupancy(plan: CachePlan, segments: Sequence[Segment]) -> Occupancy:
    """The mean occupancy of a plan's tables over scales, layers, heads and tokens."""
    raise NotImplementedError(type(plan))


@plan_occupancy.register
def _(plan: ScalePlan, segments: Sequence[Segment]) -> Occupancy:
    return Occupancy(held=held_shares(plan, segments), written=written_shares(plan, segments))


@plan_occupancy.register
def _(plan: TokenPlan, segments: Sequence[Segment]) -> Occupancy:
    """Slots in use where contents are known beforehand; a policy that decides may use all. All
    layers have equally many: the first one's."""
    if not plan.static_content:
        return Occupancy()
    return Occupancy(slots_in_use=per_token.used_slots(plan)[:, 0].tolist())


def held_shares(plan: ScalePlan, segments: Sequence[Segment]) -> dict[tuple[int, int], float]:
    """`Occupancy.held`: for each segment the mean over its scales, layers and heads."""
    found = {}
    for segment in segments:
        entries = max(map(plan.entries, segment.scales))
        here = slice(segment.start, segment.stop)
        held = (plan.stop - plan.start)[here, ..., :entries]
        if held.size:
            found[segment.length, entries] = float(held.mean()) / plan.block_size
    return found


def written_shares(
    plan: ScalePlan, segments: Sequence[Segment]
) -> dict[tuple[int, int], tuple[float, float]]:
    """`Occupancy.written` where contents are known beforehand; empty where a policy decides."""
    found = {}
    for segment in segments if plan.static_content else ():
        writes = write_table(plan, segment.scales, segment.length)
        stored = writes.source >= 0  # [S, L, N, J, block_size]
        if stored.size:
            shares = float(stored.any(-1).mean()), float(stored.mean())
            found[segment.length, stored.shape[-2]] = shares
    return found
