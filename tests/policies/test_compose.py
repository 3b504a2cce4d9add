"""Every sensible pair of policies, and a reason for every other."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import models_under_test as models
from tests.policies.observations import CAPACITIES, DEMO, check_counts, kept_columns, observation
from varjax import policies
from varjax.cache.allocation import Geometry
from varjax.cache.planner import plan_cache
from varjax.calibration.data import Calibration
from varjax.errors import UserError
from varjax.policies import POLICIES, Compose, get_policy
from varjax.policies.compose_parts import refusals
from varjax.policies.windows import Newest
from varjax.schedule import Schedule

REFUSED = refusals()
BY_SCALE = [name for name, cls in POLICIES.items() if cls.serves("scales")]
ALLOCATING = [name for name in BY_SCALE if ("allocate", name) not in REFUSED and name != "table"]
SELECTING = [name for name in BY_SCALE if ("select", name) not in REFUSED]


def calibration(geometry: Geometry) -> Calibration:
    """Measurements of everything that any policy wants, at random."""
    rng = np.random.default_rng(0)
    layers, heads, scales = geometry.num_layers, geometry.num_heads, geometry.schedule.num_scales
    return Calibration(
        beta=rng.random((layers, heads, scales, scales)),
        key_discrepancy=rng.random((layers, scales)),
        query_variance=rng.random((layers, heads)),
        selectivity=rng.random((layers, scales)),
    )


def pair(allocate: str, select: str, budget: float | None = 0.3, **more: str) -> Compose:
    return get_policy("compose", budget, {"allocate": allocate, "select": select, **more})


def test_the_matrix_is_not_empty():
    assert len(ALLOCATING) >= 9 and len(SELECTING) >= 7
    assert {name for _, name in REFUSED} <= set(POLICIES)


@pytest.mark.parametrize("select", SELECTING)
@pytest.mark.parametrize("allocate", ALLOCATING)
def test_capacities_of_one_and_selection_of_the_other(allocate, select):
    measured = calibration(DEMO)
    plan = plan_cache(DEMO, pair(allocate, select, accounting="tokens"), measured)
    alone = plan_cache(DEMO, get_policy(allocate, 0.3, {"accounting": "tokens"}), measured)
    np.testing.assert_array_equal(plan.capacity, alone.capacity)
    assert not plan.static_content and plan.policy.selector.name == select
    assert plan.policy.needs == plan.policy.selector.needs
    in_bytes = plan_cache(DEMO, pair(allocate, select), measured)
    assert in_bytes.pool_tokens <= 0.3 * DEMO.dense_tokens
    tables = plan.policy.inputs(DEMO, plan.allocation, np.arange(2))
    hash(plan.policy), tables


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("select", ["swa", "streaming", "headkv", "snapkv", "h2o", "scalekv"])
def test_selections_fill_any_capacity(select, capacity):
    """Also capacities that are smaller than the sinks of the selection."""
    policy = pair("snapkv", select).prepare(DEMO, None)
    inputs = jnp.array([14, 3]) if select == "headkv" else jnp.int32(14)
    obs = observation(1, capacity, inputs=inputs)
    check_counts(obs, policy.select(obs))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_newest_tokens_and_sinks(seed, capacity):
    obs = observation(seed, capacity, inputs=jnp.int32(14))
    live, position = np.asarray(obs.live), np.asarray(obs.position)
    for head, kept in kept_columns(Newest().select(obs)).items():
        oldest = sorted(np.flatnonzero(live[head]), key=lambda c: position[head][c])
        sinks = [c for c in oldest if position[head][c] < 14][:capacity]
        rest = [c for c in oldest if c not in sinks]
        assert kept == {*sinks, *rest[::-1][: capacity - len(sinks)]}


def test_sinks_follow_the_selection():
    def protected(select, **more):
        return plan_cache(DEMO, pair("h2o", select, **more)).allocation.protected

    assert protected("swa") == 0
    assert protected("streaming") == 5  # two scales fit half of 19 tokens
    assert protected("streaming", select_sinks="1") == 1


def test_arguments_reach_their_part():
    policy = pair("hack", "snapkv", allocate_asymmetry="3", select_window="8", block_size="2")
    assert policy.allocator == policies.HACK(budget=0.3, asymmetry=3.0, block_size=2)
    assert policy.selector == policies.SnapKV(budget=0.3, window=8, block_size=2)
    chex.assert_shape(policy.window_tokens(8, 8), (8,))
    in_python = Compose.of(
        allocate=policies.HACK(budget=0.3, asymmetry=3.0, block_size=2),
        select=policies.SnapKV(window=8),
    )
    assert in_python == policy and hash(in_python) == hash(policy)
    assert pair("heatkv", "snapkv", None).budget == policies.HeatKV().budget


def test_calibration_is_used_where_a_part_does():
    assert pair("heatkv", "snapkv").uses_calibration and pair("snapkv", "hack").uses_calibration
    assert not pair("snapkv", "h2o").uses_calibration
    plan_cache(DEMO, pair("snapkv", "scalekv"))  # its selection needs none
    for names in (("heatkv", "snapkv"), ("snapkv", "hack"), ("scalekv", "snapkv")):
        with pytest.raises(UserError, match="a calibration"):
            plan_cache(DEMO, pair(*names))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allocate": "snapvk", "select": "h2o"}, "did you mean 'snapkv'"),
        ({"allocate": "snapkv", "select": "h20"}, "did you mean 'h2o'"),
        ({"allocate": "snapkv", "select": "hack", "select_contxtual": "1"}, "'select_contextual'"),
        ({"allocate": "snapkv", "select": "h2o", "selct_x": "1"}, "no argument 'selct_x'"),
        (
            {"allocate": "hack", "select": "h2o", "allocate_asymetry": "1"},
            "did you mean 'allocate_asymmetry'",
        ),
        ({"allocate": "snapkv", "select": "h2o", "select_budget": "1"}, "no argument"),
        ({"allocate": "hack", "select": "h2o", "allocate__types": "1"}, "no argument"),
        ({"allocate": "hack", "select": "h2o", "allocate_sinks": "x"}, "not a whole number"),
        ({"allocate": "hack", "select": "h2o", "block_size": "x"}, "not a whole number"),
        ({"allocate": "snapkv", "select": "h2o", "parts": "x"}, "no argument 'parts'"),
    ],
)
def test_wrong_text(arguments, message):
    with pytest.raises(UserError, match=message):
        get_policy("compose", None, arguments)


@pytest.mark.parametrize(("role", "name"), REFUSED)
def test_senseless_pairs_are_refused_with_the_reason(role, name):
    parts = {"allocate": "snapkv", "select": "h2o", role: name}
    with pytest.raises(UserError, match=f"{role}={name} makes no sense: "):
        get_policy("compose", None, parts)


@pytest.mark.parametrize("role", ["allocate", "select"])
def test_parts_must_serve_the_model(role):
    """Not known before there is one."""
    policy = get_policy("compose", 0.3, {"allocate": "snapkv", "select": "h2o", role: "rkv"})
    with pytest.raises(UserError, match="'rkv': it does not serve models that draw scale by scale"):
        plan_cache(DEMO, policy)


@pytest.mark.parametrize(("role", "names"), [("allocate", ALLOCATING), ("select", SELECTING)])
def test_unknown_policies_are_told_what_works(role, names):
    with pytest.raises(UserError, match=f"unknown policy for {role}") as error:
        get_policy("compose", None, {role: "zzz"})
    listed = str(error.value).rsplit("choose one of ", 1)[1].split(", ")
    assert set(listed) - {"table"} == {*names, "linear", "rkv"}


IDLE = {
    ("allocate", "streaming"): {"sinks": "1"},
    ("allocate", "snapkv"): {"window": "8", "kernel": "3"},
    ("allocate", "h2o"): {"recent_share": "0.1"},
    ("allocate", "scalekv"): {"grid": "2", "kernel": "3", "faithful": "true"},
    ("select", "hack"): {"asymmetry": "3"},
    ("select", "headkv"): {
        **{"group_after": "9", "threshold": "0.5", "global_heads": "1", "local_share": "0.9"},
    },
    ("select", "scalekv"): {"budgets": "missing.json", "drafters": "2", "refiner_share": "0.5"},
    ("select", "amskv"): {
        **{"mode": "online", "preset": "d30-table3", "cmin": "8", "cmax": "12", "demanding": "2"},
        **{"layers": "0", "theta": "-1", "ratio": "3", "oversize": "fill"},
    },
}
EVERY_IDLE = [(*key, *item) for key, arguments in IDLE.items() for item in arguments.items()]


@pytest.mark.parametrize(("role", "name", "argument", "text"), EVERY_IDLE)
def test_arguments_of_the_other_role_are_refused(role, name, argument, text):
    parts = {"allocate": "snapkv", "select": "h2o", role: name, f"{role}_{argument}": text}
    other = "select" if role == "allocate" else "allocate"
    with pytest.raises(UserError, match=f"{role}_{argument}={text} has no effect") as error:
        get_policy("compose", None, parts)
    instead = f"or give it to {other}: {other}={name},{other}_{argument}={text}"
    assert str(error.value).endswith("leave it out" if name == "headkv" else instead)
    part = get_policy(name, None, {argument: text})
    with pytest.raises(UserError, match="has no effect"):
        Compose.of(**{"allocate": policies.SnapKV(), "select": policies.H2O(), role: part})


@pytest.mark.parametrize(
    ("name", "argument", "text"), [case[1:] for case in EVERY_IDLE if case[0] == "allocate"]
)
def test_what_is_refused_does_not_change_capacities(name, argument, text):
    def held(**arguments):
        policy = get_policy(name, 0.3, {"accounting": "tokens", **arguments})
        return plan_cache(DEMO, policy, calibration(DEMO)).capacity

    np.testing.assert_array_equal(held(**{argument: text}), held())


MATTERS = {
    ("allocate", "heatkv"): {"sinks": "1"},
    ("allocate", "hack"): {"sinks": "4", "contextual": "0.1", "asymmetry": "9"},
    ("allocate", "scalekv"): {"drafters": "2", "refiner_share": "1"},
    ("allocate", "amskv"): {"demanding": "2", "layers": "0", "theta": "-0.5", "ratio": "9"},
    ("select", "streaming"): {"sinks": "1"},
    ("select", "hack"): {"sinks": "1", "contextual": "0.1"},
    ("select", "headkv"): {"sinks": "1", "recent_share": "0.5", "window": "8", "ratio": "0.9"},
    ("select", "snapkv"): {"window": "3", "kernel": "3"},
    ("select", "h2o"): {"recent_share": "0.1"},
    ("select", "scalekv"): {"grid": "3", "kernel": "3", "faithful": "true"},
    ("select", "amskv"): {"condensed": "1", "condensed_tokens": "2"},
}


@pytest.mark.parametrize(
    ("role", "name", "argument", "text"),
    [(*key, *item) for key, arguments in MATTERS.items() for item in arguments.items()],
)
def test_arguments_of_the_own_role_matter(role, name, argument, text):
    """Capacities, or what the selection is told, change."""

    def told(**more):
        parts = {"allocate": "snapkv", "select": "h2o", role: name}
        policy = pair(**parts, budget=0.5, **more)
        plan = plan_cache(DEMO, policy, calibration(DEMO))
        if role == "allocate":
            return plan.capacity.tolist()
        inputs = jax.tree.leaves(plan.policy.inputs(DEMO, plan.allocation, np.arange(2)))
        fields = ("kernel", "ratio", "recent_share")
        used = [getattr(plan.policy.selector, field, None) for field in fields]
        return [i.tolist() for i in inputs], plan.policy.needs, used

    assert told() != told(**{f"{role}_{argument}": text})


LARGE_FIRST_SCALE = Geometry(
    schedule=Schedule(((2, 3), (2, 4), (3, 4))), num_layers=2, num_heads=2, head_dim=8
)


@pytest.mark.parametrize("select", SELECTING)
def test_no_budget_is_too_small_for_the_selection(select):
    """The first scale alone has 6 tokens, a head holds 2: of what is always kept the oldest."""
    plan = plan_cache(LARGE_FIRST_SCALE, pair("swa", select, 0.2), calibration(LARGE_FIRST_SCALE))
    np.testing.assert_array_equal(plan.capacity[1:], 2)
    assert plan.policy.selector.name == select
    inputs = plan.policy.inputs(LARGE_FIRST_SCALE, plan.allocation, np.arange(1))
    if select == "hack":
        inputs = (jnp.array([True, False, True]), jnp.int32(plan.allocation.protected))
    else:
        inputs = jax.tree.map(lambda a: jnp.asarray(a[0, 0]), inputs)
    obs = observation(2, 2, inputs=inputs)
    kept = plan.policy.select(obs)
    check_counts(obs, kept)
    position = np.where(obs.live, obs.position, 99)
    if select in ("streaming", "hack", "headkv"):
        for head, columns in kept_columns(kept).items():
            oldest = np.argsort(position[head])[:2]
            assert {c for c in oldest if position[head][c] < 6} <= columns


def test_condensed_tokens_beyond_the_capacity():
    """Of the condensed tokens the oldest stay, as with sinks."""
    policy = pair("swa", "amskv", 0.2, select_condensed="2")
    plan = plan_cache(DEMO, policy, calibration(DEMO))
    assert plan.allocation.protected == 5
    obs = observation(1, 3, inputs=jnp.array([99, 99, 14, 1]))
    kept = plan.policy.select(obs)
    check_counts(obs, kept)
    position = np.where(obs.live, obs.position, 99)
    for head, columns in kept_columns(kept).items():
        assert columns == set(np.argsort(position[head])[:3])


def test_compositions_made_in_python_are_checked_too():
    with pytest.raises(UserError, match="makes no sense"):
        Compose.of(allocate=policies.SnapKV(), select=policies.HeatKV())


def test_what_is_not_said():
    policy = get_policy("compose")
    assert policy.allocator == policies.HeatKV() and policy.selector == policies.SnapKV(budget=0.1)
    assert policy.plan_lines(DEMO)[0].split() == ["parts", "allocate=heatkv,", "select=snapkv"]
    assert Compose().allocator == policy.allocator and Compose().budget == policy.budget
    assert get_policy("compose", None, {"select": "h2o"}).selector.name == "h2o"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"budget": 1.5}, r"budget=1.5 is outside"),
        ({"budget": 0.01}, "too small for policy 'snapkv'"),
        ({"select_recent_share": "2"}, "recent_share=2 is outside"),
        ({"select": "snapkv", "select_window": "65"}, "window=65"),
        ({"select": "streaming", "select_sinks": "6"}, "sinks=6: choose 1 to 5"),
        ({"select": "amskv", "select_condensed": "6"}, "condensed=6: choose 0 to 5"),
        ({"block_size": "3"}, "power of two"),
    ],
)
def test_parts_check_their_arguments(more, message):
    with pytest.raises(UserError, match=message):
        parts = {"allocate": "snapkv", "select": "h2o", "budget": 0.3}
        plan_cache(DEMO, pair(**{**parts, **more}))


def test_a_table_gives_capacities(tmp_path):
    keep = np.zeros((6, 3, 4, 6), bool)
    keep[1:, :, :2, 0] = keep[3:, :, 2:, 2] = True
    np.savez(tmp_path / "keep.npz", keep_scale=keep)
    path = str(tmp_path / "keep.npz")
    policy = pair("table", "h2o", allocate_path=path)
    plan = plan_cache(DEMO, policy)
    np.testing.assert_array_equal(plan.capacity[5], [[1, 1, 9, 9]] * 3)
    assert policy.content() == policies.Table(path=path).content() and not policy.shrinks


def test_state_of_the_selection():
    class Counting(policies.SnapKV):
        def init_state(self, geometry, rows):
            return jnp.zeros(rows)

        def update_state(self, obs):
            return obs.state + 1

    assert pair("h2o", "snapkv").prepare(DEMO, None).init_state(DEMO, 2) is None
    policy = dataclasses.replace(pair("h2o", "snapkv"), _prepared=(policies.H2O(), Counting()))
    prepared = policy.prepare(DEMO, None)
    obs = observation(0, 3, state=prepared.init_state(DEMO, 2))
    np.testing.assert_array_equal(prepared.update_state(obs), [1, 1])


@pytest.mark.parametrize(
    ("allocate", "select", "budget"),
    [
        pytest.param("heatkv", "snapkv", 0.3, marks=pytest.mark.slow),
        pytest.param("scalekv", "streaming", 0.3, marks=pytest.mark.slow),
        pytest.param("snapkv", "headkv", 0.3, marks=pytest.mark.slow),
        ("swa", "streaming", 0.1),  # the sinks do not fit
    ],
)
def test_on_a_real_model(allocate, select, budget):
    """All heads hold what the one policy allows, in the regions that the plan gives them."""
    model = models.fixture_model("b_k6_sharedaln")
    more = {"select_sinks": "4"} if budget < 0.3 else {}
    policy = pair(allocate, select, budget, **more)
    plan = plan_cache(model.geometry, policy, calibration(model.geometry))
    generator = models.greedy_generator(model, policy, plan=plan, segments=models.LAST_ALONE)
    results, state = generator.run_batch([3, 7], [0, 1])
    chex.assert_tree_all_finite(results["logits"])
    held = (np.asarray(state.position) >= 0).sum(-1)
    np.testing.assert_array_equal(held, plan.capacity[-1].sum())
