"""Diagonal Attention against an oracle of lists and loops, and what it promises: how much is
stored, how much is read, and that what is skipped is not read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.geometry import read_geometry
from experiments.plan import timeline
from tests.often import often
from tests.tokens import oracles, stand_in
from varjax import policies
from varjax.core import token_decision
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.core.token_step import OffsetStep
from varjax.core.tokens import token_step

ROWS = 2
CLOSE = 2e-5  # float32 against float64
XL = read_geometry("layers=36,heads=20,head_dim=64,tokens=576,condition=1,line=24")


def oracle(q, k, v, visible, *, ring, reads, sinks=0, score="mean"):
    """Outputs [steps, G, H] of one head of keys, its skipped offsets, and how many image keys
    queries read.

    q: [G, M + N, H]. k, v: [M + N, H]. As the manual says it, with lists.
    """
    condition = len(visible)
    skipped, seen_by_offset, outputs, counts = [], {}, [], []
    for t in range(len(k) - condition - 1):
        query = q[:, condition + t].astype(np.float64)
        window = [i for i in range(sinks, t + 1) if t - i < ring]
        read = [i for i in window if t - i not in skipped]
        tokens = [i for i in range(condition) if visible[i]]
        tokens += [condition + i for i in range(min(sinks, t + 1))]
        tokens += [condition + i for i in read]
        weights = [oracles.softmax(k[tokens].astype(np.float64) @ one) for one in query]
        outputs.append([w @ v[tokens].astype(np.float64) for w in weights])
        weights = sum(weights) / len(weights)
        counts.append(len(read))
        for i, weight in zip(read, weights[len(tokens) - len(read) :], strict=True):
            seen_by_offset.setdefault(t - i, []).append(weight)
        if len(window) < reads or len(skipped) == ring - reads:
            continue
        value = {o: w[-1] if score == "query" else np.mean(w) for o, w in seen_by_offset.items()}
        candidates = [t - i for i in read]
        skipped.append(min(candidates, key=lambda o: (value[o], -o)))
    return np.array(outputs), set(skipped), counts


def arguments_of(plan):
    """What the oracle takes, from a plan."""
    a = plan.allocation
    return {
        "ring": int(a.slots[0]) - a.protected,
        "reads": int(a.reads[0]),
        "sinks": a.protected,
        "score": plan.policy.score,
    }


CASES = {
    "default": {"budget": 0.4},
    "sinks": {"budget": 0.5, "sinks": 4},
    "query": {"budget": 0.6, "score": "query", "sinks": 1},
    "few": {"budget": 0.5, "share": 0.1},
    "all stored": {"budget": 0.4, "share": 0.3, "accounting": "tokens", "sinks": 2},
    "a slot": {"budget": 5.1 / 51},
}


@pytest.mark.parametrize("case", often(("sinks", "query", "a slot"), CASES))
def test_against_the_oracle(case):
    shared = 2 if case == "query" else 1
    plan = stand_in.plan_for(policies.Diagonal(**CASES[case]), layers=2, group=shared)
    model = stand_in.StandIn.random(plan.geometry, ROWS, seed=len(case))
    out, state = stand_in.run(model, plan)
    step, last = token_step(plan, 0, None), plan.sequence.steps - 1
    assert isinstance(step, OffsetStep)
    different = set()
    for layer, row, head in np.ndindex(*model.k.shape[:3]):
        arrays = stand_in.of_head(model, layer, row, head)
        expected, skipped, counts = oracle(*arrays, model.visible[row], **arguments_of(plan))
        attended = out[row, 1:, layer, stand_in.of_group(model, head)]
        np.testing.assert_allclose(attended, expected, atol=CLOSE)
        skips = np.asarray(state[layer].skipped)[row, head]  # by slot of the ring
        found = skips[(last - step.protected - np.arange(len(skips))) % len(skips)]
        assert set(np.flatnonzero(found).tolist()) == skipped
        assert len(skipped) == step.slots - step.protected - step.reads
        assert max(counts) == counts[-1] == step.reads
        different.add(frozenset(skipped))
    assert len(different) > 1 or case == "a slot", "all heads are alike: the test says little"


def test_the_whole_ring_is_streaming():
    plans = [
        stand_in.plan_for(policy)
        for policy in (
            policies.Diagonal(budget=0.4, share=1.0, sinks=3),
            policies.Streaming(budget=0.4, sinks=3),
        )
    ]
    assert plans[0] == plans[1] and plans[0].allocation.reads is None
    assert plans[0] != stand_in.plan_for(policies.Diagonal(budget=0.4, share=0.9, sinks=3))


class Poisoning:
    """A strategy whose skipped keys and values are NaN while it attends."""

    def __init__(self, step):
        self.step = step

    def __getattr__(self, name):
        return getattr(self.step, name)

    def attend(self, cache, heads, current):
        skipped = jnp.roll(cache.skipped, 1, axis=-1)
        fixed = jnp.zeros((*skipped.shape[:2], self.step.first), bool)
        gone = jnp.concatenate([fixed, skipped], axis=-1)
        # the query's own token is stored while it attends, whether it is read or not
        gone = (gone & (jnp.arange(gone.shape[-1]) != current.slot))[..., None]
        out, found = self.step.attend(
            dataclasses.replace(cache, pool=jnp.where(gone, jnp.nan, cache.pool)), heads, current
        )
        return out, dataclasses.replace(found, pool=jnp.where(gone, cache.pool, found.pool))


def test_skipped_keys_are_not_read():
    plan = stand_in.plan_for(policies.Diagonal(budget=0.5, sinks=1))
    model = stand_in.StandIn.random(plan.geometry, ROWS)
    expected, _ = stand_in.run(model, plan)
    program, arguments = stand_in.traced(model, plan, decide=Poisoning)
    found = np.asarray(program(*arguments)[0]["logits"])
    np.testing.assert_array_equal(found.ravel(), expected.ravel())


@pytest.mark.slow
def test_layers_that_choose_together_choose_as_alone(monkeypatch):
    plan = stand_in.plan_for(policies.Diagonal(budget=0.5), layers=3)
    model = stand_in.StandIn.random(plan.geometry, ROWS)
    alone = stand_in.run(model, plan)
    monkeypatch.setitem(token_decision.TOGETHER, "cpu", 2**20)
    found = stand_in.run(model, plan)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- plans ---


def test_both_numbers_are_reported():
    plan = plan_cache(XL, policies.Diagonal(budget=1 / 8, sinks=4))
    assert plan.layer_slots[0] == 72 and plan.allocation.reads[0] == 33
    words = (
        "the first 4 image tokens, 33 of the newest 67 image tokens, which are stored, and the "
        "condition (1): 6.60% of full; chosen from image token 36 to 69"
    )
    assert plan.facts()["reads"] == words and f"reads     {words}" in timeline(plan)
    assert plan.arrays()["reads"].tolist() == [33] * 36
    assert plan.read_tokens == 1 + 4 + 33
    assert "reads" not in plan_cache(XL, policies.Streaming(budget=1 / 8)).facts()


def test_papers_may_count_what_is_read():
    """1/8 of 576 are 72 tokens that are read, of 144 or 180 that are stored."""
    for share, ring in ((0.5, 144), (0.4, 180), (0.1, 575)):
        plan = plan_cache(XL, policies.Diagonal(budget=1 / 8, accounting="tokens", share=share))
        assert plan.layer_slots[0] == 1 + ring and plan.allocation.reads[0] == 72


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sinks": -1}, "sinks=-1 must be 0 to 574"),
        ({"sinks": 100}, r"what always stays \(101\).*smallest feasible budget is 0.1771"),
        ({"score": "sum"}, "unknown score 'sum': choose one of mean, query"),
        ({"share": 1.5}, "share=1.5"),
        ({"period": 0}, "period=0 must be 1 to 574"),
    ],
)
def test_arguments_that_cannot_work(arguments, message):
    with pytest.raises(UserError, match=message):
        plan_cache(XL, policies.Diagonal(budget=0.125, **arguments))
