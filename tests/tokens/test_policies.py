"""Every policy on models that draw token by token, against its oracle (`oracles.py`) and against
what all of them have to keep."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.often import often
from tests.tokens import oracles, stand_in
from varjax import policies
from varjax.core.errors import UserError
from varjax.core.observation import Observation
from varjax.policies import POLICIES, get_policy

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


def check(policy, shared=1, group=None, seed=0, **simulated):
    """The program's attention, and what it holds, against the oracle's, in every head. shared: by
    how many query heads a head of keys and values is."""
    plan = stand_in.plan_for(policy, group=shared)
    model = stand_in.StandIn.random(plan.geometry, ROWS, seed)
    out, state = stand_in.run(model, plan)
    condition = plan.sequence.condition
    contents = None if plan.static_content else held(state, condition)
    kinds = {}
    for layer, row, head in np.ndindex(*model.k.shape[:3]):
        arrays, options = stand_in.of_head(model, layer, row, head), simulated
        if group is not None:
            stage, threshold, window = group

            def local(weights, place=(layer, row, head), threshold=threshold, window=window):
                kinds.setdefault(place, []).append(oracles.need(weights, threshold) < window)
                return kinds[place][-1]

            options = simulated | {"group": (stage, local), "window": window}
        expected, numbers = oracles.simulate(*arrays, model.visible[row], **options)
        found = out[row, 1:, layer, stand_in.of_group(model, head)]
        np.testing.assert_allclose(found, expected, atol=CLOSE)
        if contents is not None:
            assert contents[layer, row, head] == set(numbers)
    return plan, list(kinds.values())


def sizes(policy):
    """(slots, period) of the planned policy."""
    plan = stand_in.plan_for(policy)
    return {"slots": int(plan.allocation.slots[0]), "period": plan.allocation.period}


@pytest.mark.parametrize(
    ("recent_share", "seed", "shared"),
    often([(0.5, 0, 1)], [(0.5, 0, 1), (0.0, 1, 2), (0.9, 0, 4)]),
)
def test_h2o(recent_share, seed, shared):
    policy = policies.H2O(budget=0.4, recent_share=recent_share, period=4)
    check(policy, shared, seed=seed, **sizes(policy), decide=oracles.h2o(recent_share))


@pytest.mark.parametrize(
    ("period", "window", "kernel", "shared"),
    often([(4, 2, 3, 2)], [(5, 0, None, 1), (4, 2, 3, 2), (6, 6, 1, 1)]),
)
def test_snapkv(period, window, kernel, shared):
    policy = policies.SnapKV(budget=0.45, period=period, window=window, kernel=kernel)
    rule = oracles.snapkv(window or period, kernel or 5)
    check(policy, shared, **sizes(policy), decide=rule)


@pytest.mark.parametrize(
    ("score", "period", "window", "sinks", "shared"),
    often(
        [("attention", None, None, 0, 1), ("logit", 5, 3, 2, 2)],
        [("attention", None, None, 0, 1), ("logit", 5, 3, 2, 2), ("logit", None, None, 0, 4)],
    ),
)
def test_linear(score, period, window, sinks, shared):
    policy = policies.LineAR(budget=0.6, score=score, period=period, window=window, sinks=sinks)
    planned = stand_in.plan_for(policy).policy
    found = {"attention": oracles.mean_attention, "logit": oracles.mean_logit}[score]
    rule = oracles.linear(planned.window, found, sinks)
    check(policy, shared, **sizes(policy), decide=rule)


@pytest.mark.parametrize(
    ("mix", "kernel", "shared"), often([(0.9, 3, 2)], [(0.1, 7, 1), (0.9, 3, 2)])
)
def test_rkv(mix, kernel, shared):
    policy = policies.RKV(budget=0.5, period=5, window=3, mix=mix, kernel=kernel)
    check(policy, shared, **sizes(policy), decide=oracles.rkv(3, mix, kernel))


@pytest.mark.parametrize(
    ("score", "ratio", "group_after", "budget", "sinks", "shared"),
    often(
        [("logit", 0.5, 12, 0.6, 0, 1), ("attention", 0.3, 10, 0.5, 2, 2)],
        [
            ("logit", 0.5, 12, 0.6, 0, 1),
            ("attention", 0.3, 10, 0.5, 2, 2),
            ("attention", 0.5, 100, 0.4, 0, 1),
            ("logit", 0.75, 15, 0.5, 0, 1),
        ],
    ),
)
def test_headkv(score, ratio, group_after, budget, sinks, shared):
    """Grouping before the budget is full and when it is full; odd numbers of tokens to drop."""
    arguments = dict(budget=budget, ratio=ratio, group_after=group_after, sinks=sinks)
    policy = policies.HeadKV(score=score, period=3, window=6, threshold=0.6, **arguments)
    found = {"attention": oracles.mean_attention, "logit": oracles.mean_logit}[score]
    rule = oracles.headkv(6, found, 1 - ratio, sinks)
    size = sizes(policy)
    stages = range(100)
    # the first stage after which more is held than the threshold, or than may stay
    full = (n for n in stages if 3 * (n + 1) + 3 > group_after or 3 * (n + 1) > size["slots"] - 3)
    seed = 2 if shared == 1 else 7
    _, kinds = check(policy, shared, (next(full), 0.6, 6), seed=seed, **size, decide=rule)
    assert {all(k) for k in kinds} == {True, False}, "all heads are alike: the test says little"
    assert shared == 1 or {True, False} in map(set, kinds), "groups agree: the test says little"


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


@pytest.mark.parametrize(
    ("policy", "sinks"),
    [
        (policies.Full(), 0),
        (policies.SlidingWindow(budget=0.3), 0),
        (policies.Streaming(budget=0.4, sinks=4), 4),
    ],
)
def test_known_contents(policy, sinks):
    slots = int(stand_in.plan_for(policy).allocation.slots[0])
    check(policy, 2, **oracles.ring(slots, sinks))


# --- tables and compositions ---


def random_table(rows: int, period: int, seed: int = 0, tokens: int = 49, heads: int = 3):
    """bool [K, 1, 2 * rows, heads, tokens]: every token goes at some stage, or never."""
    stages = 1 + -(-(tokens - 1) // period)
    rng, token = np.random.default_rng(seed), np.arange(tokens)
    born = 1 + token // period
    gone = born + rng.integers(0, 6, (1, 2 * rows, heads, tokens))
    number = np.arange(stages).reshape(-1, 1, 1, 1, 1)
    return (number > born) & (number <= gone) & (token < tokens - 1)


@pytest.mark.parametrize(
    ("per_row", "period", "shared"), often([(True, 4, 1)], [(True, 4, 1), (False, 5, 2)])
)
def test_table(tmp_path, period, per_row, shared):
    """A pattern of every row's own, and one for all rows."""
    keep = random_table(ROWS, period)
    if not per_row:
        keep = np.broadcast_to(keep[:, :, :1], keep.shape)
    path = tmp_path / "keep.npz"
    np.savez(path, keep_token=keep if per_row else keep[:, :, 0])
    policy = policies.Table(path=str(path))
    plan = stand_in.plan_for(policy, group=shared)
    model = stand_in.StandIn.random(plan.geometry, ROWS)
    out, state = stand_in.run(model, plan)
    slots = int(plan.allocation.slots[0])
    assert slots == keep.sum(-1)[:, :, : ROWS if per_row else None].max() + period
    contents = held(state, 3)
    for row, head in np.ndindex(ROWS, 3):
        arrays = stand_in.of_head(model, 0, row, head)
        rule = oracles.table(keep[:, 0, row, head])
        more = dict(slots=slots, period=period, decide=rule, full=False)
        expected, numbers = oracles.simulate(*arrays, model.visible[row], **more)
        found = out[row, 1:, 0, stand_in.of_group(model, head)]
        np.testing.assert_allclose(found, expected, atol=CLOSE)
        assert contents[0, row, head] == set(numbers)


TABLES = {
    "stages": (lambda k: k[:-1], r"needs \(11, 1, 4, 3, 49\) \(stages, layers, heads, tokens\)"),
    "early": (lambda k: np.ones_like(k), "stage 0 is said to see image token 0 .* not exist"),
    "returns": (lambda k: _returning(k), "is dropped before stage 3 and visible again at stage 4"),
}


def _returning(keep):
    found = keep.copy()
    found[2:, ..., 0], found[3, ..., 0] = True, False
    return found


@pytest.mark.parametrize(("change", "message"), TABLES.values(), ids=TABLES)
def test_tables_that_cannot_be(tmp_path, change, message):
    np.savez(tmp_path / "keep.npz", keep_token=change(random_table(ROWS, 4)))
    with pytest.raises(UserError, match=message):
        stand_in.plan_for(policies.Table(path=str(tmp_path / "keep.npz")))


def composed(budget=None, **arguments):
    return get_policy("compose", budget, arguments)


def test_compositions_select():
    """All heads alike: what the selecting policy does at that budget."""
    parts = {"allocate": "linear", "select": "h2o"}
    policy = composed(0.4, select_recent_share="0.2", period="4", **parts)
    check(policy, **sizes(policy), decide=oracles.h2o(0.2))


def test_a_table_gives_layers_their_room(tmp_path):
    """Capacities of the file, contents of the other."""
    keep = np.concatenate([random_table(ROWS, 4), random_table(ROWS, 4, seed=1)], axis=1)
    keep[:, 1] &= np.arange(49) % 2 == 0
    np.savez(tmp_path / "keep.npz", keep_token=keep)
    parts = {"allocate": "table", "allocate_path": str(tmp_path / "keep.npz"), "select": "snapkv"}
    plan = stand_in.plan_for(composed(select_window="2", **parts), layers=2)
    slots, most = plan.allocation.slots, keep.sum(-1).max((0, 2, 3))
    assert slots.tolist() == (most + 4).tolist() and slots[0] > slots[1]
    model = stand_in.StandIn.random(plan.geometry, ROWS)
    out, _ = stand_in.run(model, plan)
    for layer, row, head in np.ndindex(2, ROWS, 3):
        arrays = stand_in.of_head(model, layer, row, head)
        more = dict(slots=int(slots[layer]), period=4, decide=oracles.snapkv(2))
        expected, _ = oracles.simulate(*arrays, model.visible[row], **more)
        found = out[row, 1:, layer, stand_in.of_group(model, head)]
        np.testing.assert_allclose(found, expected, atol=CLOSE)
    with pytest.raises(UserError, match="leaves a layer 6 image tokens .* snapkv needs 8"):
        narrow = dict(parts, allocate_path=str(_narrow(tmp_path)))
        stand_in.plan_for(composed(**narrow))


def _narrow(folder):
    np.savez(folder / "narrow.npz", keep_token=random_table(ROWS, 4) & (np.arange(49) < 2))
    return folder / "narrow.npz"


def test_a_quota_of_global_heads():
    """The neediest of every row; of equals the lower number."""
    mass = jnp.asarray([[[0.0, 0.1, 0.9], [0.9, 0.0, 0.1], [0.5, 0.2, 0.3], [0.5, 0.2, 0.3]]])
    mass = jnp.concatenate([mass, mass[:, ::-1]])
    position = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), mass.shape)
    heads = jnp.zeros(mass.shape[:2], jnp.int32)
    obs = Observation(
        scale=jnp.int32(0),
        live=jnp.ones(mass.shape, bool),
        position=position,
        capacity=heads,
        regions=heads,
        newest_mass=mass,
    )

    def local(**arguments):
        return policies.HeadKV(window=2, **arguments).rule("tokens").regroup(obs).tolist()

    for quota, expected in {1: [1, 0, 1, 1], 2: [1, 0, 0, 1], 3: [1, 0, 0, 0], 4: [0] * 4}.items():
        assert local(global_heads=quota)[0] == expected, quota
    assert local(global_heads=2)[1] == [0, 0, 1, 1]
    assert local()[0] == [1, 0, 0, 0]


# --- invariants ---

SPECIAL = (
    "full",  # what the others are compared with
    "table",  # keeps what a file says, whatever the budget
    "learned",  # needs a file
    "compose",  # its parts are tested
)
EVERY = [n for n, cls in POLICIES.items() if cls.serves("tokens") and n not in SPECIAL]
DECIDING = [n for n in EVERY if POLICIES[n]().rule("tokens").decides]


@pytest.mark.parametrize("name", EVERY)
def test_the_whole_budget_is_the_full_cache(name):
    full, whole = (stand_in.plan_for(get_policy(n, 1.0)) for n in ("full", name))
    assert whole == full and whole.static_content
