"""Full-size models by shape only: nothing is allocated. Exact counts of sizes whose files we know:
tests/ported_weights/test_released_names.py."""

import jax
import pytest

import varjax
from tests.often import often
from varjax import policies
from varjax.core.planner import plan_cache
from varjax.models import registry
from varjax.storage import parameters

PUBLISHED = {
    **{"var-d20": 600e6, "var-d24": 1.0e9, "var-d30": 2.0e9},
    **{"infinity-layer12": 125e6, "infinity-layer16": 361e6, "infinity-layer24": 940e6},
    **{"infinity-layer32": 2.2e9, "infinity-layer40": 4.7e9},
}
PLANNED = ("var-d16", "var-d30", "infinity-layer12", "var-d36", "infinity-8b")


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts(name):
    preset = registry.preset(name)
    part = registry.family(preset.family).parts["transformer"]
    module = parameters.abstract(part.module, preset.configs["transformer"])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(module))
    assert parameters.count(module) == pytest.approx(PUBLISHED[name], rel=0.04)


@pytest.mark.parametrize("name", often(PLANNED[:1], PLANNED))  # the last takes 1.1 GiB
def test_plans(name):
    geometry = varjax.describe(name).geometry
    for policy in (policies.Full(), policies.Streaming(budget=0.1), policies.HeadKV(budget=0.1)):
        plan = plan_cache(geometry, policy)
        assert plan.num_bytes(1, "bfloat16") <= policy.budget * plan.dense_bytes(1, "bfloat16")
