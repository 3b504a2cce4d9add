"""HeadKV's decisions against a NumPy reading of the method, head by head, with plain loops."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests import models_under_test as models
from tests.policies.observations import HEADS, ROWS, observation
from varjax import policies
from varjax.core.allocation import Geometry
from varjax.core.planner import plan_cache
from varjax.core.sequence import Schedule

DEMO = Geometry(schedule=Schedule.square((1, 2, 3, 4, 6, 8)), num_layers=2, num_heads=4, head_dim=8)


def keep_by_hand(live, position, mass, capacity, protected, recent, ratio) -> set[int]:
    """Columns that one head keeps."""
    newest_first = sorted(np.flatnonzero(live), key=lambda c: -position[c])
    kept = [c for c in newest_first if position[c] < protected]
    rest = [c for c in newest_first if position[c] >= protected]
    window = rest[: max(0, min(recent, capacity - len(kept)))]
    kept += window
    history = rest[len(window) :]
    count = min(capacity - len(kept), len(history))
    near_size = int(np.ceil(np.float32(ratio) * len(history)))
    near, far = history[:near_size], history[near_size:]
    near_count = int(np.clip(np.round(np.float32(ratio) * count), 0, len(near)))
    near_count = max(near_count, min(count - len(far), len(near)))
    best = lambda group, n: sorted(group, key=lambda c: (-mass[c], c))[:n]  # noqa: E731
    return {*kept, *best(near, near_count), *best(far, count - near_count)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("capacity", "protected", "recent"), [(8, 2, 3), (5, 1, 4), (12, 0, 2), (15, 3, 20)]
)
def test_select_follows_the_method(seed, capacity, protected, recent):
    policy = policies.HeadKV(ratio=0.4)
    obs = observation(seed, capacity, inputs=jnp.array([protected, recent]))
    kept = np.asarray(policy.rule("scales").select(obs))
    for r, n in np.ndindex(ROWS, HEADS):
        arrays = (np.asarray(a)[r, n] for a in (obs.live, obs.position, obs.window_mass))
        expected = keep_by_hand(*arrays, capacity, protected, recent, 0.4)
        assert set(np.flatnonzero(kept[r, n])) == expected
        assert len(expected) == min(capacity, int(obs.live[r, n].sum()))


def test_heads_are_ranked_by_how_far_back_they_look():
    """Need = newest tokens that gather the threshold, own scale first."""
    obs = observation(0, 8)
    mass = np.zeros(obs.live.shape)
    position = np.broadcast_to(np.arange(mass.shape[-1]), mass.shape)
    for head, back in enumerate([2, 14, 5]):  # all mass `back` tokens before the newest
        mass[:, head, -back] = 1
    obs = dataclasses.replace(
        obs,
        scale_mass=jnp.asarray(mass),
        position=jnp.asarray(position),
        live=jnp.ones(mass.shape, bool),
    )
    rule = policies.HeadKV().rule("scales")
    np.testing.assert_array_equal(rule.tokens_needed(obs)[0], [2, 14, 5])
    np.testing.assert_array_equal(rule.regroup(obs)[0], [2, 0, 1])  # numbers of regions


def test_capacities():
    """Nothing is dropped before grouping; afterwards the heads that need most are wide, what does
    not divide goes to the first of them, and all together is the budget."""
    given = {"budget": 0.5, "block_size": 1, "local_share": 0.5}
    plan = plan_cache(DEMO, policies.HeadKV(**given, group_after=10))
    assert plan.allocation.regroup_scale == 2  # 14 tokens held after scale 2
    np.testing.assert_array_equal(plan.capacity[:4, 0, 0], [0, 1, 5, 14])
    np.testing.assert_array_equal(plan.capacity[5], [[39, 39, 38, 16]] * 2)
    assert plan.capacity[5].sum() == 0.5 * DEMO.dense_tokens
    half = plan_cache(DEMO, policies.HeadKV(**given, global_heads=2))
    np.testing.assert_array_equal(half.capacity[5], [[50, 50, 16, 16]] * 2)


@pytest.mark.parametrize(("heads", "local"), [(1, 0), (2, 1), (8, 1), (20, 2), (30, 4)])
def test_one_head_in_eight_is_local(heads, local):
    """By default, and at least one where there are two: 6 to 19 % are published."""
    geometry = dataclasses.replace(DEMO, num_heads=heads)
    plan = plan_cache(geometry, policies.HeadKV(budget=0.5, block_size=1, local_share=0.5))
    sizes = plan.capacity[5, 0]
    assert ((sizes < sizes[0] - 1).sum(), len(sizes)) == (local, heads)


@pytest.mark.parametrize(("share", "recent"), [(0, 0), (0.1, 3), (0.25, 8), (1, 19)])
def test_newest_tokens_leave_room_for_history(share, recent):
    """Also where every head is global: those heads once kept the newest tokens alone. The sinks
    take 14 of 33, and leave at most 19."""
    policy = policies.HeadKV(budget=0.5, block_size=1, global_heads=4, recent_share=share)
    plan = plan_cache(DEMO, policy)
    np.testing.assert_array_equal(plan.capacity[5], [[33] * 4] * 2)
    assert (plan.allocation.protected, plan.allocation.recent) == (14, recent)


@pytest.mark.slow
def test_heads_take_their_tokens_along_where_there_is_room_for_all():
    """Nothing has to be chosen when heads change their regions, but everything stored moves."""
    model = models.fixture_model("c_k5_nol2norm")
    results = []
    for policy in ("full", policies.HeadKV(budget=1.0, group_after=10)):
        generator = models.greedy_generator(model, policy)
        found, _ = generator.run_batch(np.array([3, 7], np.int32), np.arange(2))
        results.append((generator.plan, found))
    (_, expected), (plan, found) = results
    scale = plan.allocation.regroup_scale
    assert scale is not None and plan.moves(scale) and not plan.selects(scale)
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-3)
