"""Every sensible pair of policies, and a reason for every other."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from tests.models_under_test import learned_tables
from tests.policies.observations import CAPACITIES, DEMO, check_counts, observation
from varjax import policies
from varjax.calibration import files
from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.core.sequence import Schedule
from varjax.policies import POLICIES, Compose, get_policy

REFUSED = [(role, name) for name, cls in POLICIES.items() for role in cls.unfit_roles]
BY_SCALE = [name for name, cls in POLICIES.items() if cls.serves("scales")]
ALLOCATING = [name for name in BY_SCALE if ("allocate", name) not in REFUSED and name != "table"]
# knapsack's search takes long on larger ones
SMALL = Geometry(schedule=Schedule.square([1, 2, 3, 5]), num_layers=2, num_heads=2, head_dim=8)
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
        learned=learned_tables(geometry),
    )


def pair(allocate: str, select: str, budget: float | None = 0.3, **more: str) -> Compose:
    return get_policy("compose", budget, {"allocate": allocate, "select": select, **more})


@pytest.mark.parametrize(
    ("allocate", "select"),
    [*((name, "snapkv") for name in ALLOCATING), *(("hack", name) for name in SELECTING)],
)
def test_capacities_of_one_and_selection_of_the_other(allocate, select):
    measured = calibration(SMALL)
    plan = plan_cache(SMALL, pair(allocate, select, accounting="tokens"), measured)
    alone = plan_cache(SMALL, get_policy(allocate, 0.3, {"accounting": "tokens"}), measured)
    np.testing.assert_array_equal(plan.capacity, alone.capacity)
    assert not plan.static_content and plan.policy.selector.name == select
    assert plan.rule.needs == plan.policy.selector.rule("scales").needs
    in_bytes = plan_cache(SMALL, pair(allocate, select), measured)
    assert in_bytes.pool_tokens <= 0.3 * SMALL.dense_tokens
    tables = plan.rule.inputs(SMALL, plan.allocation, np.arange(2))
    hash(plan.policy), tables


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("select", ["swa", "streaming", "headkv", "snapkv", "h2o", "scalekv"])
def test_selections_fill_any_capacity(select, capacity):
    """Also capacities that are smaller than the sinks of the selection."""
    policy = pair("snapkv", select).rule("scales").prepare(DEMO, None)
    inputs = jnp.array([14, 3]) if select == "headkv" else jnp.int32(14)
    obs = observation(1, capacity, inputs=inputs)
    check_counts(obs, policy.rule("scales").select(obs))


def test_arguments_reach_their_part():
    policy = pair("hack", "snapkv", allocate_asymmetry="3", select_window="8", block_size="2")
    assert policy.allocator == policies.HACK(budget=0.3, asymmetry=3.0, block_size=2)
    assert policy.selector == policies.SnapKV(budget=0.3, window=8, block_size=2)
    chex.assert_shape(policy.rule("scales").window_tokens(8, 8), (8,))
    in_python = Compose.of(
        allocate=policies.HACK(budget=0.3, asymmetry=3.0, block_size=2),
        select=policies.SnapKV(window=8),
    )
    assert in_python == policy and hash(in_python) == hash(policy)
    assert pair("heatkv", "snapkv", None).budget == policies.HeatKV().budget


def test_calibration_is_used_where_a_part_does():
    assert pair("heatkv", "snapkv").uses_calibration and pair("snapkv", "hack").uses_calibration
    assert not pair("snapkv", "h2o").uses_calibration
    assert pair("learned", "hack").calibration_files == ("learned.npz", "calibration.json")
    found = files.find(pair("learned", "hack"), varjax.describe("demo"), None)
    assert found.learned and found.beta is not None  # of both files
    plan_cache(DEMO, pair("snapkv", "scalekv"))  # its selection needs none
    for names in (("heatkv", "snapkv"), ("snapkv", "hack")):
        with pytest.raises(UserError, match="a calibration"):
            plan_cache(DEMO, pair(*names))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allocate": "snapvk", "select": "h2o"}, "did you mean 'snapkv'"),
        ({"allocate": "snapkv", "select": "hack", "select_contxtual": "1"}, "'select_contextual'"),
        ({"allocate": "snapkv", "select": "h2o", "select_budget": "1"}, "no argument"),
        ({"allocate": "hack", "select": "h2o", "allocate__types": "1"}, "no argument"),
        ({"allocate": "hack", "select": "h2o", "allocate_sinks": "x"}, "not a whole number"),
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


IDLE = {
    ("allocate", "streaming"): {"sinks": "1"},
    ("allocate", "snapkv"): {"window": "8", "kernel": "3"},
    ("select", "hack"): {"asymmetry": "3"},
    ("select", "headkv"): {"group_after": "9"},
    ("select", "amskv"): {"preset": "d30-table3", "oversize": "fill"},
}
EVERY_IDLE = [(*key, *item) for key, arguments in IDLE.items() for item in arguments.items()]


@pytest.mark.parametrize(("role", "name", "argument", "text"), EVERY_IDLE)
def test_arguments_of_the_other_role_are_refused(role, name, argument, text):
    parts = {"allocate": "snapkv", "select": "h2o", role: name, f"{role}_{argument}": text}
    with pytest.raises(UserError, match=f"no argument '{role}_{argument}'"):
        get_policy("compose", None, parts)
    part = get_policy(name, None, {argument: text})
    with pytest.raises(UserError, match="no argument"):
        Compose.of(**{"allocate": policies.SnapKV(), "select": policies.H2O(), role: part})


def test_what_is_not_said():
    policy = get_policy("compose")
    assert policy.allocator == policies.HeatKV() and policy.selector == policies.SnapKV(budget=0.1)
    lines = policy.rule("scales").plan_lines(DEMO)
    assert lines[0].split() == ["parts", "allocate=heatkv,", "select=snapkv"]
    assert Compose().allocator == policy.allocator and Compose().budget == policy.budget
    assert get_policy("compose", None, {"select": "h2o"}).selector.name == "h2o"
