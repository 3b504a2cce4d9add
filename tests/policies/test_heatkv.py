"""HeatKV against the authors' schedules (tests/fixtures/policies/heatkv), array by array."""

import json
import pathlib

import numpy as np
import pytest

from varjax import policies
from varjax.calibration import data as measured
from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.allocator import after_each_layer
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.core.sequence import Schedule
from varjax.policies.heatkv_schedule import PruneSchedule, heads_to_remove, prune_schedule

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures/policies/heatkv"
PUBLISHED = {
    "schedule_2b_b10": ("orders_2b", "infinity-2b"),
    "schedule_8b_b20": ("orders_8b", "infinity-8b"),
}
SYNTHETIC = ("synth_1", "synth_2")
ALL = (*PUBLISHED, *SYNTHETIC)


class Problem:
    """One fixture: arrays, geometry and orders; masks unpacked."""

    def __init__(self, name: str):
        with np.load(FOLDER / f"{name}.npz") as archive:
            self.arrays = {key: archive[key] for key in archive.files}
        self.sinks, self.budget = int(self["sink_scales"]), float(self["budget"])
        self.geometry = Geometry(
            schedule=Schedule(tuple(map(tuple, self["scale_hw"].tolist()))),
            num_layers=int(self["num_layers"]),
            num_heads=int(self["num_heads"]),
            head_dim=8,
        )
        if name in PUBLISHED:
            content = json.loads((FOLDER / f"{PUBLISHED[name][0]}.json").read_text())
            self.orders = measured.read_orders(content, self.geometry)
        else:
            self.orders = self["orders"]
        self.calibration = Calibration(orders=self.orders)

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]

    def mask(self, key: str) -> np.ndarray:
        """bool [K, K, L, N]."""
        if key in self.arrays:
            return self[key]
        bits = np.unpackbits(
            self[f"{key}_packed"], axis=-1, bitorder="little", count=self.geometry.num_heads
        )
        return bits.astype(bool)


@pytest.fixture(params=ALL)
def problem(request):
    return Problem(request.param)


def test_schedule_equals_the_published_one(problem):
    found = prune_schedule(
        problem.geometry, problem.orders, sinks=problem.sinks, budget=problem.budget
    )
    counts = heads_to_remove(problem.geometry, problem.sinks, problem.budget)
    np.testing.assert_array_equal(counts[:-1], problem["n_removed"][:-1])
    np.testing.assert_array_equal([0, *counts[:-1]], problem["incoming_counts"])
    np.testing.assert_array_equal(found.removed, problem.mask("G"))
    np.testing.assert_array_equal(found.hidden, problem.mask("A"))
    np.testing.assert_array_equal(found.early_count, problem["early_count"])
    total = totals(problem.geometry, found)
    np.testing.assert_array_equal(total, problem["cache_total_after_layer"][:-1])
    assert total.max() <= problem["threshold_total_tokens"]


def totals(geometry: Geometry, found: PruneSchedule) -> np.ndarray:
    """int [K - 1, L]: tokens stored right after each layer of a scale, if each layer makes its
    removals when it has run."""
    scale = np.arange(geometry.schedule.num_scales)
    masks = ((found.removed, scale[:, None] >= scale), (found.hidden, scale[:, None] > scale))
    held = (~gone & there[:, :, None, None] for gone, there in masks)
    after, before = (np.einsum("kjln,j->kl", h, geometry.schedule.tokens)[:-1] for h in held)
    return np.array([after_each_layer(a, b) for a, b in zip(after, before, strict=True)])


@pytest.mark.parametrize("name", SYNTHETIC)
def test_binary_schedule(name):
    problem = Problem(name)
    found = prune_schedule(
        problem.geometry,
        problem["binary_order"][None],
        sinks=problem.sinks,
        budget=problem.budget,
        whole_heads=True,
    )
    for j in range(problem.geometry.schedule.num_scales - 1):
        stored = np.arange(problem.geometry.schedule.num_scales) >= j
        wanted = problem["binary_G"] & stored[:, None, None] & (j >= problem.sinks)
        np.testing.assert_array_equal(found.removed[:, j], wanted)
    np.testing.assert_array_equal(found.hidden[:, problem.sinks], problem["binary_A"])
    assert totals(problem.geometry, found).max() <= problem.budget * problem.geometry.dense_tokens


def test_naive_counts_of_the_paper():
    """The printed Algorithm 2 makes almost everything early, and is still within the budget."""
    problem = Problem("schedule_2b_b10")
    found = prune_schedule(
        problem.geometry, problem.orders, sinks=3, budget=problem.budget, literal=True
    )
    np.testing.assert_array_equal(found.early_count[7:12], [772, 967, 894, 751, 660])
    due = (found.removed[7:12] & ~found.removed[6:11]).sum((1, 2, 3))
    np.testing.assert_array_equal(due, [795, 987, 913, 785, 687])
    np.testing.assert_array_equal(found.removed, problem.mask("G"))
    assert not (problem.mask("A") & ~found.hidden).any()
    assert totals(problem.geometry, found).max() <= problem["threshold_total_tokens"]


def test_infeasible_budget():
    problem = Problem("synth_3_infeasible")
    lowest = policies.HeatKV(sinks=problem.sinks).rule("scales").minimum_budget(problem.geometry)
    assert lowest == problem["min_feasible_budget"]
    with pytest.raises(UserError, match="infeasible.*0.0330189"):
        prune_schedule(problem.geometry, problem.orders, sinks=3, budget=problem.budget)
    with pytest.raises(UserError, match="smallest feasible budget is 0.0331"):
        plan_cache(problem.geometry, policies.HeatKV(budget=0.03), problem.calibration)
    plan = plan_cache(problem.geometry, policies.HeatKV(budget=0.0331), problem.calibration)
    assert plan.fraction <= 0.0331


# --- through the planner ---


def held(problem: Problem) -> np.ndarray:
    """int [K, L, N] tokens that A leaves, from the fixture alone."""
    schedule = problem.geometry.schedule
    scale = np.arange(schedule.num_scales)
    seen = ~problem.mask("A") & (scale[:, None] > scale)[:, :, None, None]
    return np.einsum("kjln,j->kln", seen, schedule.tokens)


@pytest.mark.slow
def test_plan_holds_what_attention_may_see(problem):
    policy = policies.HeatKV(budget=problem.budget, accounting="tokens")
    plan = plan_cache(problem.geometry, policy, problem.calibration)
    capacity = held(problem)
    np.testing.assert_array_equal(plan.capacity, capacity)
    for s in range(problem.geometry.schedule.num_scales):
        visible = plan.allocation.visible(problem.geometry, s)
        starts = problem.geometry.schedule.starts
        np.testing.assert_array_equal(
            np.moveaxis(np.add.reduceat(visible, starts, axis=-1)[..., :s] > 0, -1, 0),
            ~problem.mask("A")[s, :s],
        )
    layer = capacity.sum(-1)
    for s in range(problem.geometry.schedule.num_scales - 1):
        for k in range(problem.geometry.num_layers):
            live = layer[s + 1, : k + 1].sum() + layer[s, k + 1 :].sum()
            assert plan.live_tokens[s, k] == live <= problem["cache_total_after_layer"][s, k]


@pytest.mark.parametrize("name", ["heatkv", "binary_heatkv", "heatkv_naive"])
@pytest.mark.parametrize("budget", [0.1, 0.5, 1.0])
def test_every_variant_from_beta(name, budget):
    geometry = Problem("synth_2").geometry
    beta = np.random.default_rng(0).uniform(size=(8, 4, 10, 10))
    policy = policies.get_policy(name, budget)
    plan = plan_cache(geometry, policy, Calibration(beta=beta))
    assert plan.fraction <= budget and plan.peak_live_fraction >= 0.8 * budget
    if budget == 1:
        full = plan_cache(geometry, policies.Full())
        np.testing.assert_array_equal(plan.capacity, full.capacity)


# --- sinks and lists ---


def test_lists_fix_the_sinks():
    problem, sinks = Problem("synth_1"), 2
    measured = problem.geometry, problem.calibration
    ready = policies.HeatKV(budget=0.5).rule("scales").prepare(*measured)
    assert ready.sinks == sinks and ready.rule("scales").prepare(*measured) == ready


@pytest.mark.parametrize(
    ("policy", "lists", "message"),
    [
        (policies.HeatKV(), None, "give a calibration"),
        (policies.HeatKV(), 5, r"5 order lists for 10 scales.*or say sinks=4"),
        (policies.HeatKV(), 9, r"9 order lists for 10 scales.*there are 6 to 8"),
        (policies.HeatKV(sinks=2), 6, r"with 2 sink scales there are 7 to 7"),
        (policies.BinaryHeatKV(), 6, r"one order of heads"),
        (policies.HeatKV(), 0, r"neither orders nor beta"),
    ],
)
def test_lists_that_do_not_fit(policy, lists, message):
    problem = Problem("synth_2")
    calibration = None
    if lists is not None:
        orders = np.concatenate([problem.orders] * 2)[:lists] if lists else None
        calibration = Calibration(orders=orders)
    with pytest.raises(UserError, match=message):
        plan_cache(problem.geometry, policy, calibration)


def test_a_budget_that_is_a_whole_number_of_tokens():
    """0.6 of 300 tokens are 180, although 0.6 * 2 * 3 * 50 is less in floating point."""
    geometry = Geometry(
        schedule=Schedule.parse("1x1;3x3;4x5;4x5;4x6"), num_layers=2, num_heads=3, head_dim=8
    )
    orders = [
        [[2, 1], [0, 1], [0, 0], [1, 0], [2, 0], [1, 1]],
        [[2, 0], [0, 1], [1, 1], [0, 0], [1, 0], [2, 1]],
    ]
    schedule = prune_schedule(geometry, np.array(orders), sinks=2, budget=0.6)
    assert schedule.early_count.tolist() == [0, 0, 0, 1, 0]
    assert totals(geometry, schedule)[3].max() == 180
