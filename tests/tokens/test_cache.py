"""What the cache of a model that draws token by token keeps, whatever the policy: its promise about
bytes, what is never dropped, what is never read."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.geometry import read_geometry
from tests.often import often
from tests.tokens import stand_in
from tests.tokens.test_policies import DECIDING, EVERY, held
from varjax import policies
from varjax.core import token_state
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.generation import cost
from varjax.policies import POLICIES, get_policy

XL = read_geometry("layers=36,heads=20,head_dim=64,tokens=576,condition=1,line=24")
LUMINA = read_geometry("layers=32,heads=32,head_dim=128,tokens=4160,condition=67,line=65")
BUDGETS = (0.04, 0.125, 1 / 6, 0.25, 0.5, 0.97)
FROM_FILES = "table", "learned"
SERVING = [n for n, cls in POLICIES.items() if cls.serves("tokens") and n not in FROM_FILES]


def plan_of(geometry, name, budget):
    """The plan, or the one at the smallest feasible budget where the policy names one."""
    try:
        return plan_cache(geometry, get_policy(name, budget))
    except UserError as error:
        smallest = float(str(error).rsplit(" ", 1)[1])
        assert budget < smallest <= 1 and "smallest feasible budget is" in str(error)
        return plan_cache(geometry, get_policy(name, smallest))


@pytest.mark.parametrize("name", SERVING)
def test_pools_keep_to_the_budget(name):
    for geometry in (XL, LUMINA, stand_in.geometry(line=0, tokens=20)):
        for budget in BUDGETS:
            plan = plan_of(geometry, name, budget)
            for dtype in ("bfloat16", "int8"):
                state = jax.eval_shape(lambda p=plan, d=dtype: token_state.empty(p, 3, d))
                pools = [a for cache in state for a in (cache.pool, cache.scale) if a is not None]
                allocated = sum(math.prod(a.shape) * a.dtype.itemsize for a in pools)
                assert allocated == plan.num_bytes(3, dtype)
                assert allocated <= plan.budget * plan.dense_bytes(3, dtype) + 1e-3
            assert plan.live_tokens.max() <= plan.pool_tokens
            assert plan.peak_live_fraction > plan.budget * 0.6  # and is used
            assert plan.capacity.shape == (*plan.live_tokens.shape, geometry.num_heads)


def test_papers_count_image_tokens_after_an_update():
    """rho = 1/6 of 576 are 96 image tokens; condition and buffer come on top."""
    plan = plan_cache(XL, policies.HeadKV(budget=1 / 6, accounting="tokens"))
    assert plan.layer_slots[0] == 1 + 96 + 8 and plan.capacity.max() == 1 + 96
    plan = plan_cache(XL, policies.HeadKV(budget=1 / 8, accounting="tokens", grouping="paper"))
    assert plan.allocation.group_stage == 12  # at 104 image tokens, 105 slots
    assert plan.layer_slots[0] == 105 and plan.capacity[-1].max() == 1 + 72


# --- runs ---


class Poisoning:
    """A strategy that fills slots with NaN as soon as they are empty."""

    def __init__(self, step):
        self.step = step

    def __getattr__(self, name):
        return getattr(self.step, name)

    def decide(self, caches, stage, *arguments):
        drawn = self.step.condition + (stage + 1) * self.step.period
        return tuple(
            dataclasses.replace(cache, pool=self.poisoned(cache, drawn))
            for cache in self.step.decide(caches, stage, *arguments)
        )

    @staticmethod
    def poisoned(cache, drawn):
        """drawn: positions from this one on are those of tokens to come."""
        empty = (cache.position < 0) | (cache.position >= drawn)
        return jnp.where(empty[..., None], jnp.nan, cache.pool)


def filled(state, value):
    return tuple(dataclasses.replace(c, pool=jnp.full_like(c.pool, value)) for c in state)


@functools.cache
def run_of(name):
    """(plan, model, what its attention found, caches at the end) of three rows."""
    plan = stand_in.plan_for(get_policy(name, 0.4))
    model = stand_in.StandIn.random(plan.geometry, 3)
    return plan, model, *stand_in.run(model, plan)


@pytest.mark.parametrize("name", often(("headkv",), EVERY))
def test_dropped_tokens_are_never_read(name):
    plan, model, expected, _ = run_of(name)
    wrap = None if plan.static_content else Poisoning
    program, (state, keys) = stand_in.traced(model, plan, decide=wrap)
    found, _ = program(filled(state, jnp.nan), keys)
    np.testing.assert_array_equal(found["logits"].ravel(), expected.ravel())


@pytest.mark.slow
@pytest.mark.parametrize("name", often(("headkv", "h2o"), DECIDING))
def test_a_batch_is_its_rows_alone(name):
    plan, model, together, state = run_of(name)
    contents = held(state, 3)
    alone, state = stand_in.run(model.rows([1]), plan)
    np.testing.assert_allclose(alone[0], together[1], atol=1e-6)
    for (layer, _, head), numbers in held(state, 3).items():
        assert numbers == contents[layer, 1, head]


@pytest.mark.parametrize("name", often(("headkv", "h2o"), DECIDING))
def test_condition_and_newest_tokens_stay(name):
    """After the last decision: the condition as it was, and the newest tokens of the window."""
    plan, model, _, state = run_of(name)
    main = plan.allocation.slots[0] - plan.allocation.period
    if name == "h2o":
        window = int(plan.policy.recent_share * main)
    else:
        window = plan.policy.window
    decided, last = plan.sequence.stages(plan.allocation.period)
    newest = set(range(decided * plan.allocation.period - window, plan.sequence.steps))
    for (layer, row, head), numbers in held(state, 3).items():
        assert newest <= numbers
        assert len(numbers) == main + last
        assert (np.asarray(state[layer].position)[row, head, :3] >= 0).tolist() == (
            model.visible[row].tolist()
        )
        pool = np.asarray(state[layer].pool)[row, head, :3, : plan.geometry.head_dim]
        np.testing.assert_array_equal(pool, model.k[layer, row, head, :3])


@pytest.mark.parametrize("name", ["streaming", "headkv"])
def test_int8(name):
    plan, model, expected, _ = run_of(name)
    found, state = stand_in.run(model, plan, dtype="int8")
    assert state[0].pool.dtype == jnp.int8
    error = np.abs(found - expected)[:, : plan.sequence.stages(plan.allocation.period)[0]]
    assert 0 < error.mean() < 0.02


@pytest.mark.parametrize("name", ["headkv", "diagonal"])
def test_programs_do_not_grow_with_the_tokens(name):
    """As many operations for 4,160 tokens as for 256."""
    counts = []
    for tokens, budget in ((257, 0.25), (4161, 0.25 * 257 / 4161)):
        shape = dict(tokens=tokens, line=16, condition=1)
        plan = stand_in.plan_for(get_policy(name, budget), **shape)
        # a model of shapes: numbers for all tokens would be large
        program, arguments = stand_in.traced(stand_in.Endless(plan.geometry, 2), plan)
        text = program.lower(*arguments).as_text()
        counts.append(text.count("\n"))
    assert counts[0] == counts[1]


# --- what cannot work ---


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("headkv", {"local_share": "0.3"}, "local_share=0.3 is for models that draw scale by"),
        ("headkv", {"global_heads": "21"}, "global_heads=21, but a layer has 20 heads"),
        ("headkv", {"window": "600"}, "window=600 must be 1 to 574"),
        (
            "headkv",
            {"window": "200"},
            r"what always stays \(200\).*smallest feasible budget is 0.36",
        ),
        ("h2o", {"period": "575"}, "period=575 must be 1 to 574"),
        ("headkv", {"score": "lgit"}, "unknown score 'lgit': choose one of attention, logit"),
        (
            "headkv",
            {"grouping": "paper"},
            "holds 105 tokens per head before it groups heads, 0.1823",
        ),
        ("rkv", {"window": "9"}, "window=9 must be 1 to the period, 8"),
        ("streaming", {"sinks": "575"}, "sinks=575 must be 0 to 574"),
    ],
)
def test_arguments_that_cannot_work(name, arguments, message):
    with pytest.raises(UserError, match=message):
        plan_cache(XL, get_policy(name, 0.125, arguments))


def test_geometry_of_groups():
    """Memory counts heads of keys and values."""
    text = "layers=48,heads=8,head_dim=128,tokens=2352,condition=64,line=49"
    one, groups = read_geometry(text), read_geometry(f"{text},queries_per_head=8")
    assert (groups.num_heads, groups.queries_per_head, groups.query_heads) == (8, 8, 64)
    assert one.dense_tokens == groups.dense_tokens and one != groups
    plans = [plan_cache(g, policies.LineAR(budget=0.25)) for g in (one, groups)]
    assert plans[0].num_bytes(1, "bfloat16") == plans[1].num_bytes(1, "bfloat16")
    assert plans[0] != plans[1]  # another program
    assert "8 heads of 128, each of 8 query heads" in str(plans[1].facts())
    (half, other) = plans[1].divide(2)
    assert half.geometry.query_heads == other.geometry.query_heads == 32
    flops = [cost.attention_flops(plan, None)["attention"] for plan in plans]
    assert flops[1] == 8 * flops[0]


@pytest.mark.parametrize("name", ["full", "headkv"])
def test_pools_are_updated_in_place(name, optimized):
    """No copy of a layer's pool anywhere in the compiled program."""
    budget = 1.0 if name == "full" else 0.25
    shape = dict(condition=1, tokens=64, line=8, layers=2, size=64)
    plan = stand_in.plan_for(get_policy(name, budget), **shape)
    program, arguments = stand_in.traced(stand_in.Endless(plan.geometry, 2), plan)
    text = program.lower(*arguments).compile().as_text()
    pool = re.escape(f"f32[2,3,{plan.layer_slots[0]},128]")
    assert re.search(pool + r"\S* fusion\(", text), "the pattern finds nothing"
    assert not re.search(pool + r"\S* copy\(", text)
