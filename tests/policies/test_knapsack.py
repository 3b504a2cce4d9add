"""Knapsack: against the optimum of an integer programme, its budget at every moment, its sinks."""

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import Bounds, LinearConstraint, milp

import varjax
from varjax.calibration import files
from varjax.core.allocator import after_each_store
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.policies import Knapsack
from varjax.policies.last_uses import best_last_uses


def held(last, source, size, scales):
    """int [K, L]: what each layer holds when a scale starts."""
    later = np.arange(scales)[:, None, None, None]
    return (((last >= later) & (source < later)) * size).sum((-1, -2))


def worth(gain, last, source):
    scales = np.arange(len(gain))[:, None, None, None]
    return gain[(last >= scales) & (source < scales)].sum()


def optimum(gain, source, size, limit):
    """The greatest worth that fits, to a thousandth, by SciPy: a variable for each scale and item,
    which never returns, and a row for each store."""
    scales, layers, *_ = gain.shape
    places = np.argwhere(
        np.broadcast_to(source < np.arange(scales)[:, None, None, None], gain.shape)
    )
    number = np.full(gain.shape, -1)
    number[tuple(places.T)] = np.arange(len(places))
    count = len(places)
    now, before = number[1:], number[:-1]
    pairs = np.stack([a[(now >= 0) & (before >= 0)] for a in (now, before)])
    signs = np.repeat([1.0, -1.0], pairs.shape[1])
    rows = np.tile(np.arange(pairs.shape[1]), 2)
    stays = sp.csr_array((signs, (rows, pairs.ravel())), (pairs.shape[1], count))
    stores = np.zeros(((scales - 1) * layers, count))
    for i, (s, layer) in enumerate(np.ndindex(scales - 1, layers)):
        for other in range(layers):
            seen = number[s + (other <= layer), other]
            stores[i, seen[seen >= 0]] = np.broadcast_to(size, seen.shape)[seen >= 0]
    limits = [LinearConstraint(stays, -np.inf, 0), LinearConstraint(stores, -np.inf, limit)]
    options = {"time_limit": 20, "mip_rel_gap": 1e-3}
    whole = {"integrality": np.ones(count), "bounds": Bounds(0, 1), "options": options}
    found = milp(-gain[tuple(places.T)], constraints=limits, **whole)
    assert found.status == 0, found.message
    return -found.fun


def measured(name):
    model = varjax.describe(name)
    return model, files.find(Knapsack(), model, None, None)


slow = pytest.mark.slow
CASES = [("demo", 0.1), ("demo-eight", 0.1), ("demo-eight", 0.5)]
SLOW = [("demo", 0.05), ("demo", 0.2), ("demo", 0.5), ("demo-eight", 0.05), ("demo-eight", 0.2)]


@pytest.mark.parametrize("name, budget", CASES + [pytest.param(*c, marks=slow) for c in SLOW])
def test_it_keeps_99_percent_of_the_optimum(name, budget):
    model, calibration = measured(name)
    schedule = model.geometry.schedule
    gain, source = np.moveaxis(calibration.beta, 2, 0)[..., :-1], np.arange(schedule.num_scales - 1)
    size, limit = np.array(schedule.tokens[:-1]), int(budget * model.geometry.dense_tokens)
    last = best_last_uses(gain, source, size, limit)
    assert worth(gain, last, source) >= 0.99 * optimum(gain, source, size, limit)
    assert after_each_store(held(last, source, size, schedule.num_scales)).max() <= limit


@pytest.mark.parametrize("sinks", [False, True])
def test_items_of_any_kind(sinks):
    """Tokens, groups of them, worthless ones, fixed ones; a limit that only these fill."""
    rng = np.random.default_rng(0)
    scales, layers, heads, items = 5, 3, 2, 9
    source, size = rng.integers(0, scales - 1, items), rng.integers(1, 6, items)
    gain = rng.gamma(0.3, 1, (scales, layers, heads, items)) * (rng.random(items) < 0.8)
    fixed = (source == 0) & sinks
    least = int((size * fixed).sum()) * layers * heads
    for limit in (max(1, least), least + 7, 10**6):
        last = best_last_uses(gain, source, size, limit, fixed)
        assert after_each_store(held(last, source, size, scales)).max() <= limit
        assert (last >= source).all() and (last[..., fixed] == scales - 1).all()
    everything = worth(gain, np.full_like(last, scales), source)
    assert worth(gain, last, source) == pytest.approx(everything)
    if sinks:
        with pytest.raises(ValueError, match=f"the fixed items hold {least} tokens, more than"):
            best_last_uses(gain, source, size, least - 1, fixed)


def test_many_items():
    """Tokens as items: of so many, prices are found with a sample."""
    rng = np.random.default_rng(0)
    source = np.repeat(np.arange(4), [1, 4, 64, 144])
    size, limit = np.ones(source.size, int), 250
    gain = rng.gamma(0.3, 1, (5, 2, 5, source.size)).astype(np.float32)
    last = best_last_uses(gain, source, size, limit)
    assert after_each_store(held(last, source, size, 5)).max() <= limit
    assert worth(gain, last, source) >= 0.99 * optimum(gain, source, size, limit)


@pytest.mark.parametrize("arguments", [{}, {"sinks": 2}, {"accounting": "tokens"}])
def test_plans_keep_to_the_budget(arguments):
    model, calibration = measured("demo-eight")
    plan = plan_cache(model.geometry, Knapsack(budget=0.1, **arguments), calibration)
    limit = 0.1 * model.geometry.dense_tokens
    assert plan.static_content and 0.97 * limit <= plan.live_tokens.max() <= limit
    if "accounting" not in arguments:
        assert plan.num_bytes(1, "float32") <= 0.1 * plan.dense_bytes(1, "float32")
    sinks = model.geometry.schedule.starts[arguments.get("sinks", 0)]
    assert (plan.allocation.last_use[..., :sinks] == 7).all()


def test_what_it_refuses():
    model, calibration = measured("demo")
    too_small = "the sink scales alone need more; the smallest feasible budget"
    for arguments, words in (
        ({"sinks": 6}, "sinks=6: choose 0 to 5"),
        ({"sinks": -1}, "sinks=-1: choose 0 to 5"),
        ({"sinks": 4, "budget": 0.2}, too_small),
    ):
        with pytest.raises(UserError, match=words):
            plan_cache(model.geometry, Knapsack(**arguments), calibration)
    with pytest.raises(UserError, match="needs to know where heads look: give a calibration"):
        plan_cache(model.geometry, Knapsack(), None)
    with pytest.raises(UserError, match="made for another model: its schedule is"):
        plan_cache(varjax.describe("demo-eight").geometry, Knapsack(), calibration)
