"""Published models with every policy at the budgets of the papers: planned, not compiled."""

import pytest

from experiments.flags.policy import stand_in
from pallas_kernels.shared import mosaic_operands, triton_operands
from tests.often import often
from varjax.core import planner
from varjax.models import registry
from varjax.models.loading import describe
from varjax.policies import POLICIES, get_policy

BUDGETS = (0.04, 0.1, 0.2)
POLICY_CASES = [
    (name, arguments)
    for name, cls in POLICIES.items()
    if cls.budgeted is not False and cls.serves("scales")
    for arguments in cls.examples
]
OFTEN = ("var-d30", "var-d36", "infinity-2b", "infinity-8b")
BY_SCALE = [
    name
    for name, preset in registry.PRESETS.items()
    if hasattr(preset.configs["transformer"], "schedule")
]
TPU_BLOCKS = (8, 16, 32, 64)  # int8 takes no larger ones
BLOCKS = {*mosaic_operands.BLOCK_SIZES} & {*triton_operands.BLOCK_SIZES} & {*TPU_BLOCKS} - {8}


@pytest.mark.slow
@pytest.mark.parametrize("model", often(OFTEN, BY_SCALE))
def test_blocks_that_kernels_take_cost_next_to_nothing(model):
    """Blocks of 16 or more that every kernel takes; the pool fits the budget; of the tokens that
    the policy would keep in blocks of one slot 99 % are kept."""
    geometry = describe(model).geometry
    for name, arguments in POLICY_CASES:
        for budget in BUDGETS if name != "full" else (1.0,):
            policy = get_policy(name, budget, arguments)
            calibration = stand_in(policy, geometry)
            policy, allocation, size = planner.choose(geometry, policy, calibration)
            case = f"{model} {name} {arguments} {budget}"
            assert size in BLOCKS, case
            slots = planner.pool_slots(geometry, allocation, size)
            assert slots <= budget * geometry.dense_tokens * (1 + 1e-9), case
            wanted = policy.rule(geometry.kind).allocate(geometry, policy.budget)
            tokens = planner.peak_tokens(geometry, wanted)
            assert slots >= planner.peak_tokens(geometry, allocation) >= 0.99 * tokens, case


@pytest.mark.parametrize(
    ("name", "most"), [("full", 1.1), ("streaming", 1.5), ("headkv", 1.6), ("heatkv", 1.6)]
)
def test_heads_do_not_lie_in_many_blocks(name, most):
    """Slots that kernels fetch for a token of VAR-d30, over all scales: 1.1 to 1.6 when written.
    Heads of 42 tokens that lie one behind another in blocks of 16 need 1.4."""
    geometry = describe("var-d30").geometry
    policy = get_policy(name, 1.0 if name == "full" else 0.1)
    plan = planner.plan_cache(geometry, policy, stand_in(policy, geometry))
    fetched = (plan.stop > plan.start).sum() * plan.block_size
    assert fetched <= most * (plan.stop - plan.start).sum(dtype=int)
