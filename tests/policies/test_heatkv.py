"""HeatKV against the authors' schedules (tests/fixtures/policies/heatkv), array by array."""

import json
import math
import pathlib

import numpy as np
import pytest

from varjax import policies
from varjax.cache.allocation import Geometry
from varjax.cache.planner import plan_cache
from varjax.calibration import data as measured
from varjax.calibration.data import Calibration
from varjax.errors import UserError
from varjax.models import registry
from varjax.policies import windows as sink_rules
from varjax.policies.heatkv_schedule import prune_schedule
from varjax.schedule import Schedule

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


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_geometry(name):
    geometry = Problem(name).geometry
    known = registry.preset(PUBLISHED[name][1]).configs["transformer"]
    assert (known.schedule, known.depth, known.num_heads) == (
        geometry.schedule,
        geometry.num_layers,
        geometry.num_heads,
    )


def test_schedule_equals_the_published_one(problem):
    found = prune_schedule(
        problem.geometry, problem.orders, sinks=problem.sinks, budget=problem.budget
    )
    np.testing.assert_array_equal(found.counts, problem["n_removed"])
    np.testing.assert_array_equal(
        [0, *np.maximum(found.counts[:-1], 0)], problem["incoming_counts"]
    )
    np.testing.assert_array_equal(found.removed, problem.mask("G"))
    np.testing.assert_array_equal(found.hidden, problem.mask("A"))
    np.testing.assert_array_equal(found.early_count, problem["early_count"])
    np.testing.assert_array_equal(found.total_after_layer, problem["cache_total_after_layer"])
    # while sinks are generated the published planner counts completed scales only
    s, total = problem.sinks, problem["cache_total_incremental"]
    np.testing.assert_array_equal(found.running_total[s:], total[s:])
    heads = problem.geometry.num_layers * problem.geometry.num_heads
    np.testing.assert_array_equal(
        total[:s, 0], heads * np.array(problem.geometry.schedule.starts[:s])
    )
    assert found.total_after_layer.max() <= problem["threshold_total_tokens"]


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
    assert found.total_after_layer.max() <= problem.budget * problem.geometry.dense_tokens


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
    assert found.total_after_layer.max() <= problem["threshold_total_tokens"]


def test_infeasible_budget():
    problem = Problem("synth_3_infeasible")
    lowest = sink_rules.minimum_budget(problem.sinks, problem.geometry)
    assert lowest == problem["min_feasible_budget"]
    with pytest.raises(UserError, match="infeasible.*0.0330189"):
        prune_schedule(problem.geometry, problem.orders, sinks=3, budget=problem.budget)
    with pytest.raises(UserError, match="smallest feasible budget is 0.0331"):
        plan_cache(problem.geometry, policies.HeatKV(budget=0.03), problem.calibration)
    plan = plan_cache(problem.geometry, policies.HeatKV(budget=0.0331), problem.calibration)
    assert plan.fraction <= 0.0331


def test_without_what_prepare_gives():
    geometry, policy = Problem("synth_1").geometry, policies.HeatKV()
    with pytest.raises(UserError, match="needs measurements of the model"):
        policy.schedule(geometry, 0.5, None)
    with pytest.raises(UserError, match="needs measurements of the model"):
        policy.allocate(geometry, 0.5)
    with pytest.raises(UserError, match="by `prepare`"):
        policies.HACK().allocate(geometry, 0.5)


@pytest.mark.parametrize("arguments", [{"sinks": 10**6}, {"sinks": -1}, {"sinks": 1.0}])
def test_sinks_that_do_not_exist(arguments):
    problem = Problem("synth_1")
    sinks = problem.geometry.schedule.num_scales
    for given in (arguments, {"sinks": sinks}, {"budget": float("nan")}):
        given = {"sinks": problem.sinks, "budget": 0.9} | given
        with pytest.raises(UserError, match="sinks=|budget=nan"):
            prune_schedule(problem.geometry, problem.orders, **given)


# --- through the planner ---


def held(problem: Problem) -> np.ndarray:
    """int [K, L, N] tokens that A leaves, from the fixture alone."""
    schedule = problem.geometry.schedule
    scale = np.arange(schedule.num_scales)
    seen = ~problem.mask("A") & (scale[:, None] > scale)[:, :, None, None]
    return np.einsum("kjln,j->kln", seen, schedule.tokens)


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


def test_bytes_accounting(problem):
    plan = plan_cache(problem.geometry, policies.HeatKV(budget=problem.budget), problem.calibration)
    assert plan.num_bytes(1, "bfloat16") <= problem.budget * plan.dense_bytes(1, "bfloat16")
    assert plan.peak_live_fraction >= 0.9 * problem.budget


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


def test_whole_heads_keep_all_or_their_sinks():
    problem = Problem("synth_2")
    calibration = Calibration(orders=problem["binary_order"][None])
    for policy in (
        policies.BinaryHeatKV(budget=0.12, sinks=3, accounting="tokens"),
        policies.HeatKVNaive(budget=0.12, sinks=3, accounting="tokens", whole_heads=True),
    ):
        plan = plan_cache(problem.geometry, policy, calibration)
        starts = np.array(problem.geometry.schedule.starts)[:, None, None]
        sinks = np.minimum(starts, 14)
        assert ((plan.capacity == starts) | (plan.capacity == sinks)).all()


# --- sinks and lists ---


@pytest.mark.parametrize(("name", "sinks"), [("synth_1", 2), ("synth_2", 3)])
def test_lists_fix_the_sinks(name, sinks):
    problem = Problem(name)
    ready = policies.HeatKV(budget=0.5).prepare(problem.geometry, problem.calibration)
    assert ready.sinks == sinks and ready.prepare(problem.geometry, problem.calibration) == ready


@pytest.mark.parametrize(
    ("policy", "lists", "message"),
    [
        (policies.HeatKV(), None, "give a calibration"),
        (policies.HeatKV(), 5, r"5 order lists for 10 scales.*or say sinks=4"),
        (policies.HeatKV(), 9, r"9 order lists for 10 scales.*there are 6 to 8"),
        (policies.HeatKV(sinks=2), 6, r"sinks=2 leaves 7"),
        (policies.HeatKV(sinks=10), 6, r"sinks=10"),
        (policies.BinaryHeatKV(), 6, r"one order of heads"),
        (policies.HeatKVNaive(whole_heads=True), 6, r"one order of heads"),
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


def test_more_sinks_when_asked_for():
    problem = Problem("synth_2")
    policy = policies.HeatKV(budget=0.5, sinks=4, accounting="tokens")
    plan = plan_cache(problem.geometry, policy, Calibration(orders=problem.orders[1:]))
    assert plan.capacity[-1].min() >= 30


# --- against Algorithm 1 in plain loops ---


def greedy(geometry, orders, sinks, budget):
    """(A of every stored scale as sets of (j, head, layer), N): the authors' count, one candidate
    at a time."""
    tokens, ends = geometry.schedule.tokens, geometry.schedule.ends
    layers, heads, full = geometry.num_layers, geometry.num_heads, geometry.schedule.starts[-1]
    limit, gone, hidden, counts = budget * layers * heads * full, set(), [], []
    for k in range(len(tokens) - 1):
        excess = ends[k] - budget * full
        sink = ends[sinks - 1]
        count = (
            0 if k < sinks or excess <= 0 else math.ceil(layers * heads * excess / (ends[k] - sink))
        )
        count = min(count, layers * heads)
        counts.append(count)
        due = {(j, *e) for j in range(sinks, k + 1) for e in orders[j - sinks][:count].tolist()}
        rank = {
            (j, *e): i
            for j in range(sinks, k + 1)
            for i, e in enumerate(orders[j - sinks].tolist())
        }
        early = set()

        def total(layer, early=early, gone=gone, due=due, k=k):
            size = 0
            for here in range(layers):
                last, without = (k, due) if here <= layer else (k - 1, gone | early)
                for head in range(heads):
                    size += sum(
                        tokens[j] for j in range(last + 1) if (j, head, here) not in without
                    )
            return size

        for layer in range(layers):
            open_ = [a for a in due - gone - early if a[2] > layer and a[0] < k]
            for atom in sorted(open_, key=lambda a: (-a[2], -a[0], rank[a])):
                if total(layer) <= limit:
                    break
                early.add(atom)
            assert total(layer) <= limit + 1e-6
        hidden.append(gone | early)
        gone = due
    return hidden, counts


@pytest.mark.parametrize("seed", range(8))
def test_random_problems(seed):
    rng = np.random.default_rng(seed)
    maps = sorted(map(tuple, rng.integers(1, 7, (rng.integers(4, 7), 2)).tolist()), key=np.prod)
    layers, heads, sinks = int(rng.integers(1, 6)), int(rng.integers(1, 5)), int(rng.integers(1, 3))
    geometry = Geometry(
        schedule=Schedule(tuple(maps)), num_layers=layers, num_heads=heads, head_dim=4
    )
    pairs = np.array([[h, n] for n in range(layers) for h in range(heads)])
    orders = np.stack([rng.permutation(pairs) for _ in range(len(maps) - 1 - sinks)])
    lowest = sink_rules.minimum_budget(sinks, geometry)
    for budget in np.linspace(lowest, 1, 7):
        found = prune_schedule(geometry, orders, sinks=sinks, budget=float(budget))
        hidden, counts = greedy(geometry, orders, sinks, float(budget))
        np.testing.assert_array_equal(found.counts[:-1], counts)
        for k, gone in enumerate(hidden):
            j, layer, head = np.nonzero(found.hidden[k])
            assert set(zip(j.tolist(), head.tolist(), layer.tolist(), strict=True)) == gone


def test_a_budget_that_is_a_whole_number_of_tokens(tmp_path):
    """0.6 of 300 tokens are 180, although 0.6 * 2 * 3 * 50 is less in floating point: one early
    removal, of the last layer's head 0, suffices at scale 3."""
    geometry = Geometry(
        schedule=Schedule.parse("1x1;3x3;4x5;4x5;4x6"), num_layers=2, num_heads=3, head_dim=8
    )
    orders = [
        [[2, 1], [0, 1], [0, 0], [1, 0], [2, 0], [1, 1]],
        [[2, 0], [0, 1], [1, 1], [0, 0], [1, 0], [2, 1]],
    ]
    schedule = prune_schedule(geometry, np.array(orders), sinks=2, budget=0.6)
    assert schedule.early_count.tolist() == [0, 0, 0, 1, 0]
    assert schedule.total_after_layer[3].max() == 180
