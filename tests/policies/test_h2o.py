"""H2O's selection against plain loops."""

import numpy as np
import pytest

from tests.policies.observations import CAPACITIES, DEMO, check_counts, kept_columns, observation
from varjax import policies
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache


def keep_by_hand(live, position, mass, recent, capacity) -> set[int]:
    newest_first = sorted(np.flatnonzero(live), key=lambda c: -position[c])
    newest, rest = newest_first[:recent], newest_first[recent:]
    return {*newest, *sorted(rest, key=lambda c: (-mass[c], c))[: capacity - recent]}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("share", ["0", "0.5", "0.7", "1"])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_select_follows_the_method(seed, share, capacity):
    obs = observation(seed, capacity)
    keep = policies.H2O(recent_share=float(share)).rule("scales").select(obs)
    check_counts(obs, keep)
    recent = {"0": 0, "0.5": capacity // 2, "0.7": 7 * capacity // 10, "1": capacity}[share]
    for head, kept in kept_columns(keep).items():
        arrays = (np.asarray(a)[head] for a in (obs.live, obs.position, obs.total_mass))
        assert kept == keep_by_hand(*arrays, recent, capacity)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_wrong_arguments(share):
    with pytest.raises(UserError, match=r"recent_share=.* is outside"):
        plan_cache(DEMO, policies.H2O(recent_share=share))
