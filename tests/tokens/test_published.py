"""Plans of all published LlamaGen sizes: the promise about bytes, on the host only."""

import pytest

from tests.tokens.test_cache import SERVING
from varjax.cache.planner import plan_cache
from varjax.model import describe
from varjax.models import registry
from varjax.policies import POLICIES, get_policy

PUBLISHED = [name for name, preset in registry.PRESETS.items() if preset.family == "llamagen"]
SHRINKING = [name for name in SERVING if POLICIES[name].budgeted and POLICIES[name]().shrinks]


@pytest.mark.parametrize("budget", [1 / 4, 1 / 6, 1 / 8])
@pytest.mark.parametrize("size", PUBLISHED)
def test_region_and_buffer_keep_to_the_budget(size, budget):
    """At every token: of every layer the slots that there are, and what is live in them."""
    model = describe(size)
    geometry = model.geometry_for(model.sampling())
    allowed = budget * geometry.dense_tokens
    for name in SHRINKING:
        plan = plan_cache(geometry, get_policy(name, budget))
        slots = geometry.num_heads * sum(plan.layer_slots)
        assert plan.live_tokens.max() <= plan.pool_tokens == slots <= allowed + 1e-6
        assert slots >= 0.95 * allowed, f"{name} leaves room unused"
        whole = plan.budget * plan.dense_bytes(8, "bfloat16")
        assert plan.num_bytes(8, "bfloat16") <= whole + 1e-3


def test_all_sizes_are_there():
    assert len(PUBLISHED) == 12 and len(SHRINKING) >= 7
