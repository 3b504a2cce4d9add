"""HACK's head types, capacities and selection against plain loops."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies.observations import (
    CAPACITIES,
    DEMO,
    HEADS,
    check_counts,
    kept_columns,
    observation,
)
from varjax import policies
from varjax.calibration.data import Calibration
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache

VARIANCE = np.array([[4, 1, 1, 9], [2, 7, 8, 3], [6, 5, 0, 2]], np.float64)
CALIBRATION = Calibration(query_variance=VARIANCE)


def keep_by_hand(live, position, mass, contextual, protected, capacity) -> set[int]:
    oldest_first = sorted(np.flatnonzero(live), key=lambda c: position[c])
    sinks = [c for c in oldest_first if position[c] < protected][:capacity]
    rest = [c for c in oldest_first if c not in sinks]
    rest.sort(key=lambda c: -mass[c] if contextual else -position[c])
    return {*sinks, *rest[: capacity - len(sinks)]}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("protected", [0, 5, 14])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_select_follows_the_method(seed, protected, capacity):
    contextual = np.arange(HEADS) % 2 == 0
    obs = observation(seed, capacity, inputs=(jnp.asarray(contextual), jnp.int32(protected)))
    keep = policies.HACK().rule("scales").select(obs)
    check_counts(obs, keep)
    for (row, head), kept in kept_columns(keep).items():
        arrays = (np.asarray(a)[row, head] for a in (obs.live, obs.position, obs.scale_mass))
        assert kept == keep_by_hand(*arrays, contextual[head], protected, capacity)


def test_heads_whose_queries_agree_are_contextual():
    """The lowest fraction over the whole model; of equals the first."""
    prepared = policies.HACK(contextual=5 / 12).rule("scales").prepare(DEMO, CALIBRATION)
    expected = [[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 1, 1]]
    np.testing.assert_array_equal(prepared._types, np.array(expected, bool))
    hash(prepared)
    rule = prepared.rule("scales")
    allocation = rule.allocate(DEMO, 0.5)
    contextual, protected = rule.inputs(DEMO, allocation, np.arange(2))
    np.testing.assert_array_equal(contextual, np.repeat([expected], 6, 0))
    chex.assert_trees_all_equal(protected, np.full((6, 3), 14, np.int32))


@pytest.mark.parametrize("budget", [0.04, 0.1, 0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("asymmetry", [0.5, 1.0, 3.0])
def test_capacities(budget, asymmetry):
    policy = policies.HACK(budget=budget, asymmetry=asymmetry, accounting="tokens")
    plan = plan_cache(DEMO, policy, CALIBRATION)
    last = plan.capacity[5]
    contextual = np.array(policy.rule("scales").prepare(DEMO, CALIBRATION)._types)
    assert contextual.sum() == 9  # three in four
    assert last.sum() == int(budget * DEMO.dense_tokens + 1e-6)
    assert last.min() >= plan.allocation.protected >= 1
    narrow, wide = last[contextual].mean(), last[~contextual].mean()
    if asymmetry == 1 or budget == 1:
        assert np.ptp(last) <= 1
    elif plan.allocation.protected < last.min() and last.max() < 66:
        assert abs(wide - asymmetry * narrow) <= 1 + asymmetry  # a token of rounding each


@pytest.mark.parametrize(
    ("arguments", "calibration", "message"),
    [
        ({}, None, "python -m experiments.calibrate"),
        ({}, Calibration(), "holds no query_variance"),
        ({}, Calibration(query_variance=np.ones((3, 5))), r"shape \(3, 5\).* needs \(3, 4\)"),
        ({"contextual": 1.2}, CALIBRATION, "contextual=1.2 is outside"),
        ({"asymmetry": 0.0}, CALIBRATION, "asymmetry=0 is outside"),
        ({"sinks": 6}, CALIBRATION, "choose 1 to 5 scales"),
        ({"sinks": 3, "budget": 0.1}, CALIBRATION, "the sink scales alone need more"),
    ],
)
def test_wrong_arguments(arguments, calibration, message):
    with pytest.raises(UserError, match=message):
        plan_cache(DEMO, policies.HACK(**arguments), calibration)
