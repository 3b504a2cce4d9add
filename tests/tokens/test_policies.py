"""Every policy on models that draw token by token, against its oracle (`oracles.py`) and against
what all of them have to keep."""

import numpy as np
import pytest

from tests.tokens import oracles, stand_in
from varjax import policies
from varjax.policies import get_policy

ROWS = 2
CLOSE = 2e-5  # float32 against float64


def held(state, condition: int):
    """Numbers of the image tokens that every layer, row and head holds: {(l, r, n): set}."""
    found = {}
    for layer, cache in enumerate(state):
        position = np.asarray(cache.position)
        for row, head in np.ndindex(position.shape[:2]):
            numbers = position[row, head] - condition
            found[layer, row, head] = set(numbers[numbers >= 0].tolist())
    return found


def check(policy, budget=None, group=None, seed=0, **simulated):
    """The program's attention, and what it holds, against the oracle's, in every head."""
    plan = stand_in.plan_for(policy)
    model = stand_in.StandIn.random(plan.geometry, ROWS, seed)
    out, state = stand_in.run(model, plan)
    condition = plan.sequence.condition
    contents = None if plan.static_content else held(state, condition)
    kinds = set()
    for layer, row, head in np.ndindex(*model.q.shape[:3]):
        arrays = (a[layer, row, head] for a in (model.q, model.k, model.v))
        options = simulated
        if group is not None:
            stage, threshold, window = group

            def local(weights, threshold=threshold, window=window):
                kinds.add(oracles.need(weights, threshold) < window)
                return oracles.need(weights, threshold) < window

            options = simulated | {"group": (stage, local), "window": window}
        expected, numbers = oracles.simulate(*arrays, model.visible[row], **options)
        np.testing.assert_allclose(out[row, 1:, layer, head], expected, atol=CLOSE)
        if contents is not None:
            assert contents[layer, row, head] == set(numbers)
    return plan, kinds


def sizes(policy):
    """(slots, period) of the planned policy."""
    plan = stand_in.plan_for(policy)
    return {"slots": int(plan.allocation.slots[0]), "period": plan.allocation.period}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("recent_share", [0.5, 0.0, 0.9])
def test_h2o(recent_share, seed):
    policy = policies.H2O(budget=0.4, recent_share=recent_share, period=4)
    check(policy, seed=seed, **sizes(policy), decide=oracles.h2o(recent_share))


@pytest.mark.parametrize(("period", "window", "kernel"), [(5, 0, None), (4, 2, 3), (6, 6, 1)])
def test_snapkv(period, window, kernel):
    policy = policies.SnapKV(budget=0.45, period=period, window=window, kernel=kernel)
    rule = oracles.snapkv(window or period, kernel or 5)
    check(policy, **sizes(policy), decide=rule)


@pytest.mark.parametrize("score", ["attention", "logit"])
@pytest.mark.parametrize(("period", "window", "sinks"), [(None, None, 0), (5, 3, 2)])
def test_linear(score, period, window, sinks):
    policy = policies.LineAR(budget=0.6, score=score, period=period, window=window, sinks=sinks)
    planned = stand_in.plan_for(policy).policy
    found = {"attention": oracles.mean_attention, "logit": oracles.mean_logit}[score]
    rule = oracles.linear(planned.window, found, sinks)
    check(policy, **sizes(policy), decide=rule)


def test_lines_are_the_default():
    planned = stand_in.plan_for(policies.LineAR(budget=0.9)).policy
    assert (planned.period, planned.window) == (7, 14)


@pytest.mark.parametrize(("mix", "kernel"), [(0.1, 7), (0.9, 3)])
def test_rkv(mix, kernel):
    policy = policies.RKV(budget=0.5, period=5, window=3, mix=mix, kernel=kernel)
    check(policy, **sizes(policy), decide=oracles.rkv(3, mix, kernel))


@pytest.mark.parametrize(
    ("score", "ratio", "group_after", "budget", "sinks"),
    [
        ("logit", 0.5, 12, 0.6, 0),
        ("attention", 0.5, 100, 0.4, 0),
        ("attention", 0.3, 10, 0.5, 2),
        ("logit", 0.75, 15, 0.5, 0),
    ],
)
def test_headkv(score, ratio, group_after, budget, sinks):
    """Grouping before the budget is full and when it is full; odd numbers of tokens to drop."""
    arguments = dict(budget=budget, ratio=ratio, group_after=group_after, sinks=sinks)
    policy = policies.HeadKV(score=score, period=3, window=6, threshold=0.6, **arguments)
    found = {"attention": oracles.mean_attention, "logit": oracles.mean_logit}[score]
    rule = oracles.headkv(6, found, 1 - ratio, sinks)
    size = sizes(policy)
    stages = range(100)
    # the first stage after which more is held than the threshold, or than may stay
    full = (n for n in stages if 3 * (n + 1) + 3 > group_after or 3 * (n + 1) > size["slots"] - 3)
    _, kinds = check(policy, group=(next(full), 0.6, 6), seed=2, **size, decide=rule)
    assert kinds == {True, False}, "all heads are alike: the test says little"


def test_headkv_grouping_as_in_the_paper():
    """Nothing is dropped until more than `group_after` tokens are held, whatever the budget."""
    arguments = dict(budget=0.3, period=3, window=6, threshold=0.6, group_after=24)
    policy = policies.HeadKV(grouping="paper", accounting="tokens", **arguments)
    plan = stand_in.plan_for(policy)
    assert plan.allocation.group_stage == 7  # 24 + 3 of the condition; 21 + 3 are not more than 24
    kept = int(0.3 * 49)
    assert plan.allocation.kept[0] == kept and plan.allocation.slots[0] == 24
    rule = oracles.headkv(6, oracles.mean_logit)
    check(policy, group=(7, 0.6, 6), slots=24, period=3, kept=kept, decide=rule)


@pytest.mark.parametrize("sinks", [0, 4])
def test_streaming(sinks):
    policy = policies.Streaming(budget=0.4, sinks=sinks)
    slots = int(stand_in.plan_for(policy).allocation.slots[0])
    check(policy, **oracles.ring(slots, sinks))


@pytest.mark.parametrize("policy", [policies.Full(), policies.SlidingWindow(budget=0.3)])
def test_known_contents(policy):
    slots = int(stand_in.plan_for(policy).allocation.slots[0])
    check(policy, **oracles.ring(slots))


# --- invariants ---

DECIDING = ("headkv", "snapkv", "h2o", "linear", "rkv")
EVERY = ("swa", "streaming", *DECIDING)


@pytest.mark.parametrize("name", EVERY)
def test_the_whole_budget_is_the_full_cache(name):
    full, whole = (stand_in.plan_for(get_policy(n, 1.0)) for n in ("full", name))
    assert whole == full and whole.static_content


@pytest.mark.parametrize("period", [1, 8])
def test_local_heads_are_streaming(period):
    """With every head local what is seen is exactly the newest w tokens, whatever the period: what
    a ring of w slots holds."""
    window, condition, steps = 6, 3, 48
    budget = (condition + window + period) / (condition + steps)
    arguments = dict(period=period, window=window, threshold=1e-9, group_after=0)
    plan = stand_in.plan_for(policies.HeadKV(budget=budget, **arguments))
    model = stand_in.StandIn.random(plan.geometry, ROWS)
    found, _ = stand_in.run(model, plan)
    ring = policies.Streaming(budget=(condition + window) / (condition + steps), period=period)
    expected, _ = stand_in.run(model, stand_in.plan_for(ring))
    first = (plan.allocation.group_stage + 1) * period  # before it heads have no type
    np.testing.assert_allclose(found[:, first + 1 :], expected[:, first + 1 :], atol=CLOSE)
    assert first < 20
