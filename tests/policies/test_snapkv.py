"""SnapKV's selection against plain loops, and on a real model."""

import numpy as np
import pytest

from tests.policies.observations import (
    CAPACITIES,
    DEMO,
    check_counts,
    kept_columns,
    observation,
    window_and_peaks_by_hand,
)
from varjax import policies
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_select_follows_the_method(seed, kernel, capacity):
    obs = observation(seed, capacity)
    keep = policies.SnapKV(kernel=kernel).rule("scales").select(obs)
    check_counts(obs, keep)
    for head, kept in kept_columns(keep).items():
        live, position, mass, window = (
            np.asarray(a)[head] for a in (obs.live, obs.position, obs.window_mass, obs.window)
        )
        expected = window_and_peaks_by_hand(live, position, mass, window, capacity, kernel)
        assert kept == expected


@pytest.mark.parametrize("budget", [0.04, 0.1, 0.5, 1.0])
def test_every_head_has_the_same_capacity(budget):
    plan = plan_cache(DEMO, policies.SnapKV(budget=budget, block_size=1))
    limit = int(budget * DEMO.schedule.persistent_tokens + 1e-6)
    expected = np.minimum(limit, DEMO.schedule.starts)
    np.testing.assert_array_equal(
        plan.capacity, np.broadcast_to(expected[:, None, None], plan.capacity.shape)
    )
    assert any(plan.selects(s) for s in range(6)) == (budget < 1)


def test_the_automatic_window_leaves_room_for_history():
    def prepared(**arguments):
        return policies.SnapKV(**arguments).rule("scales").prepare(DEMO, None)

    policy = prepared(budget=0.25)
    assert policy.needs.window == policy.window == 4  # a quarter of 16 tokens
    assert prepared(budget=1.0).window == 16
    assert prepared(budget=0.04).window == 1
    assert prepared(window=9).window == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": -1}, "window=-1 must be 1 to 64"),
        ({"window": 65}, "window=65"),
        ({"kernel": 4}, "kernel=4 must be odd"),
        ({"kernel": 0}, "kernel=0"),
        ({"budget": 0.01}, "at least one token"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        plan_cache(DEMO, policies.SnapKV(**arguments))
