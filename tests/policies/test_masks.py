"""Masks on both kinds of observations: which of equals stays, and that best and lowest agree."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies.observations import CAPACITIES, observation
from varjax.core import masks


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("by_position", [False, True])
def test_what_is_not_lowest_is_best(by_position, capacity):
    """Also where many scores are equal, and whichever way ranks are found."""
    obs = dataclasses.replace(observation(0, capacity), by_position=by_position)
    score = jnp.round(4 * obs.scale_mass)
    total = obs.live.sum(-1)
    count = jnp.minimum(obs.capacity, total)
    best = masks.top(obs, score, obs.live, count)
    lowest = masks.lowest(obs, score, obs.live, total - count)
    np.testing.assert_array_equal(best, obs.live & ~lowest)
    np.testing.assert_array_equal(best.sum(-1), count)
    none = jnp.zeros(obs.live.shape, bool)
    np.testing.assert_array_equal(masks.fill(obs, none, score), best)


@pytest.mark.parametrize("by_position", [False, True])
def test_ages(by_position):
    obs = dataclasses.replace(observation(1, 7), by_position=by_position)
    for head in np.ndindex(obs.capacity.shape):
        by_age = sorted(np.flatnonzero(obs.live[head]), key=lambda c: obs.position[head][c])
        for found, expected in (
            (masks.newest(obs, obs.live, obs.capacity), by_age[-7:]),
            (masks.oldest(obs, obs.live, obs.capacity), by_age[:7]),
            (masks.first_and_newest(obs, 3), None),
        ):
            kept = set(np.flatnonzero(found[head]))
            if expected is None:
                first = [c for c in by_age if obs.position[head][c] < 3]
                expected = first + by_age[len(first) - 7 :]
            assert kept == set(expected)
