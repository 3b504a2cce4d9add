"""Whatever a caller gives to the Python API and to flags: a plan that keeps what plans promise, or
a `UserError`, before anything is compiled."""

import contextlib
import dataclasses
import io

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import varjax
from experiments import plan as plan_command
from experiments.cli import command_line
from experiments.flags.policy import stand_in
from experiments.geometry import read_geometry
from tests.models_under_test import built
from tests.properties.limits import GIB, run_limited
from tests.properties.mutations import hostile_values
from varjax import policies
from varjax.calibration.data import AXES, Calibration
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.core.sampling import Sampling
from varjax.core.sequence import Schedule
from varjax.core.state import KVState
from varjax.generation.generator import Generator
from varjax.policies import POLICIES, get_policy, text_arguments
from varjax.text.features import TextFeatures
from varjax.text.prompt_ids import PromptIds

SMALL = Geometry(schedule=Schedule.parse("1x1;2x2;3x3;4x5"), num_layers=3, num_heads=2, head_dim=4)
ODD = [
    *(0.1, 0.5, 1.0, 1, 2, 3, 8, 16, -0.0, 5e-324, 0.999999, 1e-9, 1e308, 10**400, 1j, b"x"),
    *(np.float32(0.3), np.float64("nan"), np.int64(2), np.uint8(1), np.bool_(True), np.str_("a")),
    *(np.zeros(0), np.array(2), np.array([1.5, 2]), np.array([[1], [2]]), np.array([None])),
    *({1: 2}, {1, 2}, object(), int, len, range(3), range(10**12), Ellipsis, "auto", "full", "1"),
]
values = st.sampled_from(ODD) | hostile_values()
geometries = st.builds(
    Geometry,
    schedule=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5).map(
        lambda maps: Schedule(tuple(maps))
    ),
    num_layers=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    rows_per_image=st.integers(1, 2),
)


@st.composite
def some_of(draw, names, others=values):
    """Values for one or two of the names."""
    chosen = draw(st.lists(st.sampled_from(sorted(names)), min_size=1, max_size=2, unique=True))
    return {name: draw(others) for name in chosen}


def check_plan(plan, batch_size=2):
    """What every plan promises."""
    g, tokens = plan.geometry, np.array(plan.geometry.schedule.starts)
    shape = (tokens.size, g.num_layers, g.num_heads)
    assert plan.capacity.shape == shape and (plan.capacity >= 0).all()
    assert (plan.capacity <= tokens[:, None, None]).all()
    assert plan.live_tokens.max() <= plan.pool_tokens
    if plan.accounting == "bytes":
        assert plan.pool_tokens <= plan.budget * g.dense_tokens + 1e-6
    assert (plan.start <= plan.stop).all() and plan.stop.max(initial=0) <= plan.block_size
    assert plan.ids.min(initial=0) >= 0 and (plan.ids < max(1, plan.pool_blocks)).all()
    np.testing.assert_array_equal((plan.stop - plan.start).sum(-1, dtype=int), plan.capacity)
    for dtype in ("float32", "bfloat16", "int8"):
        empty = lambda dtype=dtype: KVState.empty(plan, batch_size, dtype, "float32")  # noqa: E731
        state = jax.eval_shape(empty)
        held = [a for a in (state.kv_pool, state.kv_scale) if a is not None]
        assert plan.num_bytes(batch_size, dtype) == sum(a.size * a.dtype.itemsize for a in held)


# --- policies and plans ---


@given(st.sampled_from(sorted(POLICIES)), st.data(), geometries)
def test_fields_of_policies(name, data, geometry):
    cls = POLICIES[name]
    fields = [f.name for f in dataclasses.fields(cls) if f.name[0] != "_"]
    try:
        policy = cls(**data.draw(some_of(fields)))
        plan = plan_cache(geometry, policy, stand_in(policy, geometry))
    except UserError:
        return
    check_plan(plan)
    hash(plan.policy)
    smaller = plan_budget(policy, geometry, policy.budget * 0.9)
    if smaller is not None and policy.shrinks and policy.accounting == "tokens":
        assert smaller.peak_live_fraction <= plan.peak_live_fraction + 1e-9


def plan_budget(policy, geometry, budget):
    with contextlib.suppress(UserError):
        policy = dataclasses.replace(policy, budget=budget)
        return plan_cache(geometry, policy, stand_in(policy, geometry))


@given(st.data())
def test_arguments_of_plan(data):
    model = varjax.describe()
    names = ("model", "policy", "budget", "calibration", "sampling")
    arguments = {"model": model, "policy": "hack", "budget": 0.5} | data.draw(some_of(names))
    with contextlib.suppress(UserError):
        check_plan(varjax.plan(**arguments))


@given(st.sampled_from(sorted(AXES.keys() - {"rank_dispersion"})), st.data())
def test_measurements(name, data):
    geometry, policy = SMALL, {"beta": "heatkv", "query_variance": "hack"}.get(name, "scalekv")
    policy = get_policy("amskv" if name == "key_discrepancy" else policy, 0.6)
    sound = np.array(getattr(stand_in(policies.HACK(), geometry), name))
    if data.draw(st.booleans()):
        at = tuple(data.draw(st.integers(0, n - 1)) for n in sound.shape)
        sound[at] = data.draw(st.floats())
        array = sound
    else:
        array = data.draw(values | st.sampled_from([sound * 0, sound * 1e308, sound[:1]]))
    with contextlib.suppress(UserError):
        found = plan_cache(geometry, policy, Calibration(**{name: array}))
        assert np.isfinite(array).all() and np.any(array)
        check_plan(found)


# --- what plans are made of ---


@given(values | st.lists(st.tuples(values, st.integers(1, 5)), max_size=3), st.text())
def test_schedule(maps, text):
    for make, value in ((Schedule, maps), (Schedule.square, maps), (Schedule.parse, text)):
        with contextlib.suppress(UserError):
            found = make(value)
            assert Schedule.parse(str(found)) == found and hash(found) is not None
            assert sum(found.tokens) == found.total_tokens


@given(st.data())
def test_sampling(data):
    model, names = varjax.describe(), [f.name for f in dataclasses.fields(Sampling)]
    lists = st.lists(values, max_size=7) | st.tuples(values)
    given = data.draw(some_of(names, values | lists))
    with contextlib.suppress(UserError):
        found = model.sampling(**given)
        assert model.resolve_sampling(found) is found
        numbers = [*found.per_scale("cfg", 6), *found.per_scale("tau", 6), found.top_p]
        assert np.isfinite(np.array(numbers, float)).all() and hash(found) is not None


@given(st.data())
def test_text_features(data):
    names = [f.name for f in dataclasses.fields(TextFeatures)]
    arrays = st.lists(st.integers(-2, 5) | st.floats(), max_size=4).map(np.array)
    given = {"kv": np.ones((3, 4), np.float32), "lens": np.array([1, 2])}
    with contextlib.suppress(UserError):
        found = TextFeatures(**given | data.draw(some_of(names, values | arrays)))
        taken = found.take(np.arange(len(found)))
        assert np.isfinite(taken["kv"]).all() and taken["kv"].shape[0] == len(found) > 0


@given(st.data())
def test_prompt_ids(data):
    arrays = st.lists(st.integers(-2, 5) | st.floats(), max_size=4).map(np.array)
    given = {"ids": np.arange(3), "lens": np.array([1, 2])}
    names = ("ids", "lens", "prompts", "numbers", "slots")
    with contextlib.suppress(UserError):
        found = PromptIds(**given | data.draw(some_of(names, values | arrays)))
        taken = found.take(np.arange(len(found)))
        assert taken["ids"].shape[0] == len(found) > 0 and (taken["length"] > 0).all()
        assert taken["ids"].shape[1] >= found.longest
    with contextlib.suppress(UserError):
        assert PromptIds.of(data.draw(values | st.lists(values | arrays, max_size=3))).longest > 0


# --- generating ---


class Compiled(Exception):
    """All arguments were accepted."""


@pytest.fixture(scope="module")
def demo():
    """The embedded model; whoever compiles for it ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "compile", lambda *_: (_ for _ in ()).throw(Compiled()))
        yield varjax.describe()


GENERATE = ("model", "labels", "policy", "budget", "prompts", "text_features", "seed")
GENERATE += ("prompt_ids",)
GENERATE += ("batch_size", "sampling", "calibration", "kv_dtype", "decode_dtype")
GENERATOR = ("sampling", "batch_size", "segments", "attention", "kv_dtype", "calibration", "plan")
GENERATOR += ("mesh", "matmul_precision", "keep_logits", "keep_contents", "layers")
GENERATOR += ("decode_batch", "decode_dtype")


@given(data=st.data())
def test_arguments_of_generate(demo, data):
    given = {"model": demo, "labels": [1, 2], "policy": "streaming"}
    given |= data.draw(some_of(GENERATE, values | st.lists(values, max_size=3)))
    with contextlib.suppress(UserError):
        with pytest.raises(Compiled):
            varjax.generate(**given)
        labels = np.asarray(given["labels"])
        assert labels.dtype.kind in "iu" and 0 <= labels.min() <= labels.max() < demo.num_classes
        assert 0 <= given.get("seed", 0) < 2**31


@given(data=st.data())
def test_arguments_of_a_generator(demo, data):
    with contextlib.suppress(UserError):
        generator = built(demo, **data.draw(some_of(GENERATOR)))
        assert generator.batch_size >= 1 and generator.build.decode_batch != 0
        with pytest.raises(Compiled):
            generator([1], seed=3)


@given(values, values, values)
def test_loading(name, aspect, size):
    with contextlib.suppress(UserError):
        varjax.describe(name)
    for model in ("var-d16", "infinity-2b"):
        with contextlib.suppress(UserError):
            assert varjax.describe(model, aspect=aspect, size=size).geometry is not None
    for shape in ({"grid": aspect}, {"size": size}, {"prompt_tokens": size}):
        with contextlib.suppress(UserError):
            assert varjax.describe("lumina-mgpt-7b-512", **shape).geometry is not None


# --- the command says the same ---

FLAG_VALUES = ["0", "-1", "0.5", "1", "1.5", "2", "nan", "inf", "1e308", "1e400", "x", "True", ""]
GEOMETRY = f"--geometry=layers=3,heads=2,head_dim=4,schedule={SMALL.schedule}"


def command(*flags) -> int:
    """Exit status of `experiments.plan`; a traceback is an error of the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as ended:
            command_line.run(plan_command.main, ["plan", GEOMETRY, *flags])
    assert bool(out.getvalue()) == (ended.value.code == 0)
    assert (len(err.getvalue().splitlines()) == 1) == (ended.value.code == 2)
    return ended.value.code


@given(
    st.sampled_from([n for n, cls in POLICIES.items() if not cls.uses_calibration]),
    st.none() | st.sampled_from(FLAG_VALUES[:-1]),
    st.none() | st.sampled_from(FLAG_VALUES) | st.text(max_size=4),
    st.data(),
)
def test_the_command_refuses_the_same(name, budget, value, data):
    flags, arguments = [f"--policy={name}"], {}
    if budget is not None:
        flags.append(f"--budget={budget}")
    if value is not None:
        argument = data.draw(st.sampled_from(sorted(text_arguments.argument_types(POLICIES[name]))))
        flags.append(f"--policy_args={argument}={value}")
        arguments = {argument: value.strip()}
        if not value.strip() or value.rstrip().endswith(","):
            arguments = None  # no pair at all
    try:
        assert arguments is not None
        number = None if budget is None else float(budget)
        check_plan(varjax.plan(SMALL, get_policy(name, number, arguments)))
        expected = 0
    except (UserError, ValueError, AssertionError):
        expected = 2
    assert command(*flags) == expected


# --- limits ---

LIMITS = {
    "scales": "layers=16,heads=16,head_dim=64,schedule="
    + ";".join(f"{n}x{n}" for n in range(1, 65)),
    "heads": "layers=64,heads=64,head_dim=64,schedule="
    + ";".join(f"{n}x{n}" for n in np.linspace(1, 38, 16).astype(int)),
}


@pytest.mark.parametrize(
    "geometry",
    [
        "layers=1,heads=1,head_dim=4,schedule=" + ";".join(["1x1"] * 1024),
        "layers=1000,heads=1000,head_dim=4,schedule=1x1;2x2",
        "layers=1,heads=4096,head_dim=4,schedule=1x1;4096x4096;1x1",
        "layers=1,heads=4096,head_dim=4,schedule=" + ";".join(["1x1"] * 64),
    ],
)
def test_beyond_the_limits(geometry):
    with pytest.raises(UserError, match="at most"):
        read_geometry(geometry)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "swa", "headkv", "heatkv", "scalekv", "hack", "amskv"])
@pytest.mark.parametrize("limit", LIMITS)
def test_plans_at_the_limits(limit, name):
    """Fifteen seconds of processor time for each of two plans, and a GiB and a half."""
    code = (
        "import sys; from experiments.flags.policy import stand_in\n"
        "from experiments.geometry import read_geometry\n"
        "from varjax.core.planner import plan_cache\n"
        "from varjax.core.errors import UserError\n"
        "from varjax.policies import get_policy\n"
        "geometry = read_geometry(sys.argv[1])\n"
        "for budget in (0.03, 0.5):\n"
        "    policy = get_policy(sys.argv[2], None if sys.argv[2] == 'full' else budget)\n"
        "    try:\n"
        "        plan = plan_cache(geometry, policy, stand_in(policy, geometry))\n"
        "        assert plan.fraction <= plan.budget\n"
        "    except UserError as error:\n"
        "        assert 'tables' in str(error) or 'smallest' in str(error), error\n"
    )
    ended = run_limited("-c", code, LIMITS[limit], name, memory=6 * GIB, seconds=60)
    assert ended.status == 0, ended.stderr
    assert ended.seconds < 2 + 2 * 15 and ended.peak_bytes < 1.5 * GIB
