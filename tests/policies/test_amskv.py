"""AMS-KV: the literal algorithm against fixtures, sizes from budgets, arguments."""

import dataclasses

import numpy as np
import pytest

from tests.policies.amskv_cases import CASES, D30, D36, DEMO, calibration, fixture
from varjax.calibration.data import Calibration
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.policies import get_policy
from varjax.policies.amskv import AMSKV
from varjax.policies.amskv_rules import PRESETS


@pytest.mark.parametrize("name", CASES)
def test_literal_algorithm(name):
    """Through the policy: one layer of the case's kind among others."""
    case = fixture(name)
    whole = D30 if name.startswith("d30") else D36
    geometry = dataclasses.replace(whole, num_layers=3, num_heads=2)
    discrepancy = np.ones((3, geometry.schedule.num_scales))
    discrepancy[1] = np.where(case["below_theta"], 1, 0)
    policy = AMSKV(cmin=case["Cmin"], cmax=case["Cmax"], condensed=2, theta=-0.5)
    plan = plan_cache(geometry, policy, Calibration(key_discrepancy=discrepancy))
    total = geometry.schedule.total_tokens
    retained = np.unpackbits(case["retained_packed"], axis=-1, bitorder="little", count=total)
    for s in range(1, geometry.schedule.num_scales):
        seen = plan.allocation.visible(geometry, s)[1]
        np.testing.assert_array_equal(seen, 2 * [retained[s - 1].astype(bool)])
        assert (seen.sum(-1) == case["size_after"][s - 1]).all()


@pytest.mark.parametrize(
    ("preset", "geometry", "batch_size", "gigabytes", "saved"),
    [
        ("d30-table3", D30, 50, 4.77, 0.7872),
        ("d36-table3", D36, 25, 15.26, 0.7129),
        ("d30-abstract", D30, 50, 3.40, 0.8483),
    ],
)
def test_published_memory(preset, geometry, batch_size, gigabytes, saved):
    policy = AMSKV(preset=preset).rule("scales").prepare(geometry, None)
    tokens = policy.rule("scales").steady_tokens(geometry)
    width = geometry.num_heads * geometry.head_dim
    assert tokens * width * 6 * 2 * batch_size / 2**20 / 1000 == pytest.approx(gigabytes, abs=5e-3)
    full = geometry.schedule.total_tokens * geometry.num_layers
    assert 1 - tokens / full == pytest.approx(saved, abs=2e-4)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mode", ["profiled", "online"])
def test_presets_plan_without_a_calibration(preset, mode):
    geometry = dataclasses.replace(D30 if preset.startswith("d30") else D36, num_heads=1)
    plan = plan_cache(geometry, AMSKV(preset=preset, mode=mode))
    assert plan.budget * geometry.dense_tokens == pytest.approx(plan.pool_tokens)
    assert plan.live_tokens.max() >= 0.95 * plan.pool_tokens


# --- budgets ---


@pytest.mark.parametrize("budget", [0.0152, 0.04, 0.1, 0.2, 0.25, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("mode", ["profiled", "online"])
def test_budget_is_kept(budget, mode):
    plan = plan_cache(DEMO, AMSKV(budget=budget, mode=mode), calibration(DEMO))
    assert plan.pool_tokens <= budget * DEMO.dense_tokens + 1e-6
    assert plan.live_tokens.max() <= plan.pool_tokens
    if budget == 1:
        assert (plan.capacity == np.array(DEMO.schedule.starts)[:, None, None]).all()
    else:
        lost = DEMO.num_layers * DEMO.num_heads  # less than one token per head
        assert plan.live_tokens.max() > budget * DEMO.dense_tokens * 0.95 - lost


@pytest.mark.parametrize("theta", [-0.6, -1.0, -1.4])
@pytest.mark.parametrize("oversize", ["skip", "fill"])
def test_budget_with_a_threshold(theta, oversize):
    """Layers that turn demanding late or never do not cost the others their capacity."""
    found = calibration(DEMO)
    for budget in (0.0152, 0.1, 0.35, 0.8, 1.0):
        policy = AMSKV(budget=budget, theta=theta, oversize=oversize)
        plan = plan_cache(DEMO, policy, found)
        assert plan.pool_tokens <= budget * DEMO.dense_tokens + 1e-6
        if budget == 0.35 and oversize == "fill":
            assert plan.live_tokens.max() > 0.9 * budget * DEMO.dense_tokens


@pytest.mark.parametrize("mode", ["profiled", "online"])
def test_smallest_budget(mode):
    policy = AMSKV(mode=mode, layers="" if mode == "online" else "1;2", condensed=2)
    with pytest.raises(UserError, match=r"condensed scales.*smallest feasible budget is 0\.091"):
        plan_cache(DEMO, dataclasses.replace(policy, budget=0.08))
    plan = plan_cache(DEMO, dataclasses.replace(policy, budget=0.091))
    assert plan.capacity[-1].min() == 6


def test_given_sizes_and_budget():
    sizes = {"cmin": 10, "cmax": 40, "layers": "0"}
    with pytest.raises(UserError, match=r"more than budget=0\.1"):
        plan_cache(DEMO, AMSKV(**sizes, budget=0.1))
    assert plan_cache(DEMO, AMSKV(**sizes, budget=0.5)).budget == 0.5
    assert plan_cache(DEMO, AMSKV(**sizes)).budget < 0.25


# --- wrong arguments ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "d30-tabel3"}, "did you mean 'd30-table3'"),
        ({"preset": "d36-table3"}, "another model, of 36 layers"),
        ({"preset": "d30-table3", "cmax": "500"}, "contradict"),
        ({"cmin": "50", "cmax": "40"}, "cmin <= cmax"),
        ({"cmax": "40"}, "give both"),
        ({"cmin": "5", "cmax": "40"}, "condensed scales take 5 tokens"),
        ({"condensed": "1", "condensed_tokens": "1"}, "keep one"),
        ({"condensed": "10"}, "choose 0 to 9"),
        ({"theta": "-1", "demanding": "2"}, "contradict"),
        ({"theta": "nan"}, "theta=nan is outside .* negative distances"),
        ({"mode": "onlin"}, "did you mean 'online'"),
        ({"mode": "online", "layers": "3"}, "leave out layers"),
        ({"mode": "online", "demanding": "3"}, "needs a calibration"),
        ({"layers": "5-3"}, "from 0 to 29"),
        ({"layers": "three"}, "from 0 to 29"),
        ({"demanding": "31"}, "choose 0 to 30"),
        ({"preset": "d30-table3", "ratio": "9"}, "ratio=9 divides a budget, but cmin=41"),
        ({}, r"experiments\.calibrate"),
        ({"theta": "-1"}, r"experiments\.calibrate"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        plan_cache(D30, get_policy("amskv", None, arguments))
