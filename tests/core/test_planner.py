"""The budget is a promise: plans of every policy, on several schedules, never exceed it."""

import numpy as np
import pytest

from varjax import policies
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.core.sequence import Schedule
from varjax.models.var import SIDES_256

SCHEDULES = {
    "demo": Schedule.square((1, 2, 3, 4, 6, 8)),
    "var-256": Schedule.square(SIDES_256),
    "non-square": Schedule.parse("1x1;2x3;3x5;4x6;7x9"),
}
BUDGETED = {
    "swa": policies.SlidingWindow,
    "streaming": policies.Streaming,
    "headkv": policies.HeadKV,
}


def geometry(schedule: str) -> Geometry:
    return Geometry(schedule=SCHEDULES[schedule], num_layers=3, num_heads=4, head_dim=8)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", BUDGETED)
@pytest.mark.parametrize("budget", [0.1, 0.5, 1.0])
def test_pool_bytes_fit_the_budget(schedule, policy, budget):
    g = geometry(schedule)
    plan = plan_cache(g, BUDGETED[policy](budget=budget))
    assert plan.num_bytes(4, "float32") <= budget * plan.dense_bytes(4, "float32")
    assert plan.live_tokens.max() <= budget * g.dense_tokens
    # and the budget is used: rounding and per-head floors cost at most one token per head and 5 %
    assert (
        plan.live_tokens.max() >= 0.95 * (budget * g.dense_tokens - g.num_layers * g.num_heads) - 1
    )


def test_token_accounting_reports_the_excess():
    g = geometry("var-256")
    plan = plan_cache(g, policies.Streaming(budget=0.1, accounting="tokens", block_size=16))
    assert plan.capacity.max() == int(0.1 * 424)
    assert plan.pool_tokens == 512 > plan.live_tokens.max() == 3 * 4 * 42 and plan.fraction > 0.1


def test_window_capacity_per_scale():
    plan = plan_cache(geometry("demo"), policies.SlidingWindow(budget=0.5, block_size=1))
    np.testing.assert_array_equal(plan.capacity[:, 0, 0], [0, 1, 5, 14, 30, 33])
    assert plan.allocation.visible(plan.geometry, 5)[0, 0].nonzero()[0].min() == 66 - 33


def test_streaming_keeps_sinks_and_newest():
    plan = plan_cache(geometry("demo"), policies.Streaming(budget=0.5, sinks=2, block_size=1))
    seen = np.flatnonzero(plan.allocation.visible(plan.geometry, 5)[1, 2])
    np.testing.assert_array_equal(seen, [*range(5), *range(66 - 28, 66)])


@pytest.mark.parametrize(
    ("policy", "arguments", "message"),
    [
        (policies.SlidingWindow, dict(budget=1.5), "outside"),
        (policies.SlidingWindow, dict(budget=float("nan")), "outside"),
        (policies.Streaming, dict(budget=0.1, sinks=3), "smallest feasible budget is 0.2122"),
        (policies.Streaming, dict(budget=0.01), "smallest feasible budget is 0.0152"),
        (policies.HeadKV, dict(budget=0.2, sinks=3), "smallest feasible budget is 0.2122"),
        (policies.HeadKV, dict(sinks=9), "sinks=9"),
        (policies.HeadKV, dict(global_heads=5), "4 heads"),
        (policies.Full, dict(budget=0.5), "keeps everything"),
        (policies.Full, dict(block_size=3), "power of two"),
        (policies.Streaming, dict(budget=1.0, block_size=128), "block_size=64 or smaller"),
        (policies.Full, dict(accounting="words"), "bytes or tokens"),
    ],
)
def test_infeasible_requests(policy, arguments, message):
    with pytest.raises(UserError, match=message):
        plan_cache(geometry("demo"), policy(**arguments))


def test_plans_hash_by_content():
    a, b = (plan_cache(geometry("demo"), policies.Streaming(budget=0.3)) for _ in range(2))
    other = plan_cache(geometry("demo"), policies.Streaming(budget=0.4))
    assert a == b and hash(a) == hash(b) and a != other


def test_single_scale_needs_no_cache():
    g = Geometry(schedule=Schedule.parse("4x4"), num_layers=1, num_heads=1, head_dim=4)
    assert plan_cache(g, policies.Full()).pool_tokens == 0


def test_a_table_whose_peak_exceeds_its_budget_is_refused(tmp_path):
    """What scales hold when they start fits, what is held between two layers does not."""
    keep = np.zeros((4, 2, 1, 4), bool)
    keep[1, :, :, 0] = keep[2, 1, :, :2] = keep[3, 0, :, 2] = True
    keep[1, 1, :, 1] = False
    np.savez(tmp_path / "keep.npz", keep_scale=keep)
    g = Geometry(schedule=Schedule.square((1, 2, 3, 4)), num_layers=2, num_heads=1, head_dim=8)
    table = policies.Table(path=str(tmp_path / "keep.npz"), budget=0.33)
    with pytest.raises(UserError, match="after some layer of some scale it holds 0.5"):
        plan_cache(g, table)
    plan_cache(g, policies.Table(path=str(tmp_path / "keep.npz"), budget=0.5))


def test_the_whole_budget_keeps_everything_in_any_block_size():
    g = geometry("demo")
    with pytest.raises(UserError, match="choose block_size="):
        plan_cache(g, policies.SlidingWindow(budget=1.0, block_size=16))
    assert plan_cache(g, policies.SlidingWindow(budget=1.0)).pool_tokens == g.dense_tokens
