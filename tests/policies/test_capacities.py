"""Limits keep to the budget, exactly, and capacities never promise tokens that do not exist."""

import numpy as np
import pytest

from tests.policies.observations import DEMO
from varjax.policies import capacities


def test_whole_budget_drops_nothing():
    full = DEMO.schedule.persistent_tokens
    assert capacities.uniform(DEMO, 1.0) == full
    assert capacities.total(DEMO, 1.0) == DEMO.dense_tokens
    held = capacities.capacity(DEMO, full)
    np.testing.assert_array_equal(held[:, 0, 0], DEMO.schedule.starts)
    shares = capacities.apportion(DEMO.dense_tokens, np.arange(1.0, 13).reshape(3, 4), 1, full)
    assert (shares == full).all()


@pytest.mark.parametrize("budget", [0.04, 0.1, 1 / 3, 0.5, 0.999, 1.0])
def test_limits_stay_within_the_budget(budget):
    limit = int(budget * DEMO.dense_tokens + 1e-6)
    assert capacities.uniform(DEMO, budget) * 12 <= limit == capacities.total(DEMO, budget)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tokens", [0, 12, 13, 100, 399, 400, 555, 791, 792, 1000])
def test_apportionment_is_exact_and_within_bounds(seed, tokens):
    weights = np.random.default_rng(seed).random((3, 4)) ** 3 + 1e-3
    shares = capacities.apportion(tokens, weights, 1, 66)
    assert shares.sum() == np.clip(tokens, 12, 792)
    assert shares.min() >= 1 and shares.max() <= 66
    inside = (shares > 1) & (shares < 66)
    level = shares[inside] / weights[inside]  # one level, up to a token of rounding
    slack = 1 / weights[inside]
    assert inside.sum() < 2 or (level - slack).max() <= (level + slack).min()


def test_capacities_grow_by_what_a_scale_brings():
    wanted = np.array([0, 9, 3, 3, 50, 50])[:, None, None]
    held = capacities.capacity(DEMO, wanted)
    np.testing.assert_array_equal(held[:, 2, 3], [0, 1, 3, 3, 3 + 16, 50])
