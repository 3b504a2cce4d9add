"""The policies that select, on a real model: heads hold exactly their capacity."""

import functools

import chex
import numpy as np
import pytest

from tests import models_under_test as models
from tests.often import often
from varjax import policies
from varjax.cache.planner import plan_cache
from varjax.calibration.data import Calibration

NAME = "b_k6_sharedaln"
POLICIES = {
    "snapkv": policies.SnapKV(budget=0.1),
    "h2o": policies.H2O(budget=0.04),  # two tokens per head
    "hack": policies.HACK(budget=0.5),
    "scalekv": policies.ScaleKV(budget=0.2, grid=2),
    "scalekv-faithful": policies.ScaleKV(budget=0.2, grid=2, faithful=True),
}


@functools.cache
def calibration() -> Calibration:
    rng, geometry = np.random.default_rng(0), models.fixture_model(NAME).geometry
    layers, heads = geometry.num_layers, geometry.num_heads
    return Calibration(
        query_variance=rng.random((layers, heads)),
        selectivity=rng.random((layers, geometry.schedule.num_scales)),
    )


@functools.cache
def generator(policy):
    """Compiled once per policy."""
    model = models.fixture_model(NAME)
    plan = plan_cache(model.geometry, policy, calibration())
    return models.greedy_generator(model, policy, plan=plan, segments=models.LAST_ALONE)


def run(policy):
    made = generator(policy)
    results, state = made.run_batch([3, 7], np.arange(2))
    return made.plan, results, np.asarray(state.position)


def check_capacities(plan, position) -> None:
    """Every head of every row holds its capacity of different tokens."""
    last = plan.geometry.schedule.num_scales - 1
    for layer, head in np.ndindex(plan.capacity.shape[1:]):
        entries = (a[last, layer, head] for a in (plan.ids, plan.start, plan.stop))
        slots = [
            block * plan.block_size + offset
            for block, first, stop in zip(*entries, strict=True)
            for offset in range(first, stop)
        ]
        assert len(slots) == plan.capacity[last, layer, head]
        for held in position[:, slots]:
            assert (held >= 0).all() and len(set(held)) == len(held)


OFTEN = ("scalekv", "scalekv-faithful")  # they are compared below


@pytest.mark.parametrize("name", often(OFTEN, POLICIES))
def test_heads_hold_their_capacities(name):
    plan, results, position = run(POLICIES[name])
    chex.assert_tree_all_finite(results["logits"])
    assert plan.pool_tokens <= POLICIES[name].budget * plan.geometry.dense_tokens + 1e-6
    check_capacities(plan, position)
    assert (position[0] != position[1]).any(), "contents no longer depend on the image"


def test_faithful_scoring_is_another_scoring():
    (_, _, ours), (_, _, theirs) = run(POLICIES["scalekv"]), run(POLICIES["scalekv-faithful"])
    assert (ours != theirs).any()
