"""What every registered policy has to keep, at every budget. A new policy is tested here by being
registered."""

import dataclasses
import functools
import itertools
import math
import os
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.often import often
from varjax.calibration import files as calibrations
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.core.sampling import Sampling
from varjax.core.state import KVState
from varjax.generation import measure_calibration
from varjax.policies import POLICIES, get_policy

BUDGETS = (0.04, 0.1, 0.2, 0.5)
EVERY = {
    ",".join([name, *(f"{k}={v}" for k, v in arguments.items())]): (name, arguments)
    for name, cls in POLICIES.items()
    if cls.budgeted is not False and cls.serves("scales")
    for arguments in cls.examples
}
CASES = [case for case in EVERY if case != "full"]
# One policy of each kind of selection; every one takes minutes.
RUNS = often(("headkv", "amskv,mode=online"), CASES)
SMALL = models.FAMILIES["var"]
OTHERS = [name for family, name in models.FAMILIES.items() if family != "var"]
# knapsack searches anew for every size that a plan tries: seconds for each where little is kept.
PLANS = list(itertools.product(CASES, BUDGETS))
QUICK = [(policy, budget) for policy, budget in PLANS if policy != "knapsack" or budget == 0.5]
# Freed slots are poisoned in a program of its own: by default for each kind of cache update.
POISONED = ("heatkv", "headkv")
LABELS = np.array([3, 7], np.int32)
LOGITS = 1e-4  # float32: slots may come in another order


@functools.cache
def model_and_calibration(name: str):
    """The embedded demo with the calibration in its folder, or a fixture model measured here; both
    with made up learned tables."""
    model, calibration = model_and_measurements(name)
    learned = models.learned_tables(model.geometry)
    return model, dataclasses.replace(calibration, learned=learned)


def model_and_measurements(name: str):
    if name == "demo":
        model = varjax.load(None, "float32")
        path = calibrations.beside(model.directory)
        return model, calibrations.load(path, model.geometry)
    model, path = models.fixture_model(name), models.MODELS / f"{name}-calibration.json"
    if not path.exists():  # by one process for all
        condition, sampling = models.condition(model, LABELS), Sampling(cfg=1.5, greedy=True)
        made = path.with_suffix(f".{os.getpid()}")
        calibrations.save(
            measure_calibration.measure(model, condition, sampling, batch_size=2), made
        )
        made.replace(path)
    return model, calibrations.load(path, model.geometry)


@functools.cache
def plan_of(model: str, policy: str, budget: float):
    """The plan, or None where the policy says that the budget is too small."""
    (loaded, calibration), (name, arguments) = model_and_calibration(model), EVERY[policy]
    try:
        return plan_cache(loaded.geometry, get_policy(name, budget, arguments), calibration)
    except UserError as error:
        assert "smallest feasible budget is" in str(error)
        smallest = float(str(error).rsplit(" ", 1)[1])
        assert budget < smallest <= 1
        plan_cache(loaded.geometry, get_policy(name, smallest, arguments), calibration)
        return None


@functools.lru_cache(maxsize=4)  # compiled programs are large
def program(model: str, policy: str, budget: float):
    """A compiled greedy generator for two images, tokens given or not; in one segment, which
    compiles fastest."""
    plan = plan_of(model, policy, budget)
    if plan is None:
        pytest.skip(f"{policy} says that a budget of {budget} is too small")
    generator = models.greedy_generator(model_and_calibration(model)[0], plan=plan, segments=1)
    start(generator)
    return generator


def start(generator):
    """Compile it for tokens that are given or not; nobody looks at pictures here."""
    model = generator.model
    generator.compile(models.arrays_of(model, LABELS), model.token_arrays.no_tokens(2))
    nothing = lambda weights, code_map: code_map  # noqa: E731
    generator.program = dataclasses.replace(generator.program, pixels=nothing)


def run(generator, labels=LABELS, numbers=(0, 1), tokens=None, pool=0.0):
    """(results, final state) of a free run, or of one with the tokens given. pool: what fills the
    pool at first; it is an argument of the program, so nothing is compiled again."""
    given = generator.model.token_arrays.no_tokens(2) if tokens is None else tokens
    empty = generator.empty_state

    def filled():
        state = empty()
        return dataclasses.replace(state, kv_pool=jnp.full_like(state.kv_pool, pool))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "empty_state", filled)
        return generator.run_batch(
            models.arrays_of(generator.model, labels),
            np.array(numbers),
            given=given,
            given_scales=0 if tokens is None else None,
        )


# --- plans ---


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(("policy", "budget"), often(QUICK, PLANS))
def test_pool_keeps_to_the_budget(policy, budget, dtype):
    """Bytes of the arrays that would be allocated, int8 with its scales, and tokens that are live,
    at every layer of every scale."""
    plan = plan_of("demo", policy, budget)
    if plan is None:
        return
    state = jax.eval_shape(lambda: KVState.empty(plan, 3, dtype))
    arrays = [a for a in (state.kv_pool, state.kv_scale) if a is not None]
    allocated = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
    assert allocated == plan.num_bytes(3, dtype) <= budget * plan.dense_bytes(3, "float32")
    assert plan.live_tokens.max() <= plan.pool_tokens <= budget * plan.geometry.dense_tokens
    assert (plan.capacity[0] == 0).all()


# --- runs ---


@pytest.mark.parametrize("policy", RUNS)
def test_small_model(policy):
    check(SMALL, policy, 0.3)


@pytest.mark.parametrize("policy", CASES)
def test_whole_budget_is_the_full_cache(policy):
    check_whole_budget(SMALL, policy)


@pytest.mark.parametrize("policy", often(POISONED, CASES))
def test_dropped_tokens_are_never_read(policy):
    check_dropped(SMALL, policy, 0.3)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "policy"), [*itertools.product(OTHERS, CASES)])
def test_other_families(model, policy):
    """A text-conditional model with bits for tokens: the same checks."""
    check(model, policy, 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("policy", CASES)
def test_demo_at_every_budget(policy, budget):
    check("demo", policy, budget)
    check_dropped("demo", policy, budget)


def check(model: str, policy: str, budget: float):
    """One program, everything that has to hold of its runs: images do not see each other, their
    order does not matter, unconditional rows do not depend on the condition, and slots that nobody
    has written are never read."""
    generator = program(model, policy, budget)
    one, state = run(generator, [3, 7])
    other, _ = run(generator, [3, 1])
    swapped, _ = run(generator, [7, 3], (1, 0))
    tokens = np.asarray(one["tokens"])
    np.testing.assert_array_equal(tokens[0], other["tokens"][0])
    np.testing.assert_array_equal(tokens, np.asarray(swapped["tokens"])[::-1])
    assert (tokens[1] != np.asarray(other["tokens"][1])).any()
    _, given = run(generator, [3, 7], tokens=tokens)
    _, changed = run(generator, [5, 1], tokens=tokens)
    chex.assert_trees_all_equal(given.kv_pool[2:], changed.kv_pool[2:])
    assert (np.asarray(given.kv_pool[:2]) != np.asarray(changed.kv_pool[:2])).any()
    if given.position is not None:
        chex.assert_trees_all_equal(given.position[2:], changed.position[2:])
    poisoned, _ = run(generator, [3, 7], pool=jnp.nan)
    chex.assert_trees_all_equal(poisoned["logits"], one["logits"])


def check_whole_budget(model: str, policy: str):
    """Budget 1.0 is the full cache: the same contents by plan; where the device still chooses, the
    same tokens and logits."""
    full, whole = plan_of(model, "full", 1.0), plan_of(model, policy, 1.0)
    np.testing.assert_array_equal(whole.capacity, full.capacity)
    if whole.static_content:
        np.testing.assert_array_equal(whole.allocation.last_use, full.allocation.last_use)
    if not any(whole.selects(s) for s in range(len(whole.capacity))):
        return
    expected, found = (run(program(model, p, 1.0))[0] for p in ("full", policy))
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    chex.assert_trees_all_close(found["logits"], expected["logits"], atol=LOGITS)


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one truth value
class Poisoning:
    """A cache step that fills slots with NaN as soon as they are freed. live: bool [K, L, slots],
    for static contents."""

    cache: Any
    live: Any

    def attend_and_store(self, *arrays, step, layer, **more):
        out, state = self.cache.attend_and_store(*arrays, step=step, layer=layer, **more)
        fixed = self.live[step.scale, layer][None]
        keep = fixed if state.position is None else state.position >= 0
        keep = keep.reshape(*keep.shape[:1], *state.kv_pool.shape[1:3], 1)
        pool = jnp.where(keep, state.kv_pool, jnp.nan)
        return out, dataclasses.replace(state, kv_pool=pool)


def check_dropped(model: str, policy: str, budget: float):
    """Slots become NaN in the very step that frees them; nothing changes."""
    generator = program(model, policy, budget)
    expected, _ = run(generator)
    poisoned = models.greedy_generator(generator.model, plan=generator.plan, segments=1)
    live = jnp.asarray(live_slots(generator.plan))
    cache = tuple(Poisoning(c, live) for c in poisoned.spec.cache)
    poisoned.spec = dataclasses.replace(poisoned.spec, cache=cache)
    start(poisoned)
    found, _ = run(poisoned, pool=jnp.nan)
    chex.assert_tree_all_finite(found["logits"])
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    chex.assert_trees_all_close(found["logits"], expected["logits"], atol=LOGITS)


def live_slots(plan) -> np.ndarray:
    """bool [K, L, slots]: slots that the tables of static contents list right after layer l of
    scale s has stored."""
    num_scales, layers = plan.capacity.shape[:2]
    held = np.zeros((num_scales + 1, layers, plan.pool_tokens), bool)
    for s, layer in np.ndindex(num_scales, layers):
        for block, start, stop in zip(
            *(a[s, layer].ravel() for a in (plan.ids, plan.start, plan.stop)), strict=True
        ):
            held[s, layer, block * plan.block_size + np.arange(start, stop)] = True
    after = np.arange(layers)[:, None] >= np.arange(layers)  # [layer that ran, layer]
    now = [np.where(after[..., None], held[s + 1], held[s]).any(1) for s in range(num_scales)]
    return np.stack(now)
