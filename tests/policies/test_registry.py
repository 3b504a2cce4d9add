"""Every registered policy has what the command line, the tables and the generic tests need."""

import dataclasses
import pathlib

import chex
import numpy as np
import pytest

from varjax import policies
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.core.sequence import Schedule
from varjax.policies import POLICIES, get_policy

GEOMETRY = Geometry(schedule=Schedule.square((1, 2, 3)), num_layers=2, num_heads=2, head_dim=4)
NAN, INF = float("nan"), float("inf")
KINDS = {
    int: (1.0, 1.5, True, "1", None, NAN, [1], -(10**5000)),
    float: (NAN, INF, -INF, True, "1", None, 10**400, 1j),
    bool: (1, "true", None, 0.0),
    str: (3, None, b"x", True, "\ud800"),
}
README = pathlib.Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("name", POLICIES)
def test_policy_is_documented_and_frozen(name):
    cls = POLICIES[name]
    own = {f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")}
    own -= {"budget", "accounting", "block_size", "parts"}
    text = " ".join(c.__doc__ or "" for c in cls.__mro__[:-1])
    assert cls.__doc__ and not {n for n in own if n not in text}, "the docstring is the manual"
    assert cls.summary and cls.name == name and cls.__dataclass_params__.frozen
    hash(cls())


def test_repr_of_prepared_policies():
    """Tables that `prepare` fills in are not printed."""
    hack = policies.HACK(_types=((True,) * 16,) * 30)
    assert repr(hack) == "HACK(budget=0.25)"
    composed = policies.Compose.of(
        allocate=policies.H2O(budget=0.3), select=policies.SnapKV(window=3)
    )
    text = "Compose(budget=0.3, allocate=h2o, select=snapkv, select_window=3)"
    assert repr(composed) == text
    assert len(repr(policies.Table(path="x" * 1000))) < 100


@pytest.mark.parametrize("name", POLICIES)
def test_rules(name):
    """A policy gives one rule for each kind of model that it serves, and refuses other models."""
    policy = POLICIES[name]()
    for kind, draws in (("scales", "scale by scale"), ("tokens", "token by token")):
        if not policy.serves(kind):
            with pytest.raises(UserError, match=f"^policy '{name}': it does not serve .* {draws}"):
                policy.rule(kind)
            continue
        rule = policy.rule(kind)
        assert rule.kind == kind and rule.policy is policy
        assert rule == policy.rule(kind) and hash(rule) == hash(policy.rule(kind))


@pytest.mark.parametrize(
    ("name", "argument", "value", "kind"),
    [
        ("headkv", "score", "attention", "scales"),
        ("headkv", "local_share", 0.5, "tokens"),
        ("compose", "period", 8, "scales"),
    ],
)
def test_arguments_for_the_other_kind_of_model(name, argument, value, kind):
    policy = POLICIES[name](**{argument: value})
    with pytest.raises(UserError, match=f"^policy '{name}': {argument}=.* leave it out$"):
        policy.rule(kind)


def markdown_table() -> str:
    """The policy table of the README. Models draw by scale or by token."""
    rows = ["| policy | keeps | models | contents | default budget |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for name, cls in POLICIES.items():
        policy, kinds = cls(), [kind for kind in ("scales", "tokens") if cls.serves(kind)]
        contents = "decided per image" if policy.rule(kinds[0]).selects else "known beforehand"
        models = "both" if len(kinds) > 1 else f"by {kinds[0].removesuffix('s')}"
        contents = policy.contents or (contents if policy.budgeted else "given")
        budget = f"{policy.budget:g}" if policy.budgeted else "what it keeps"
        rows.append(f"| `{name}` | {policy.summary} | {models} | {contents} | {budget} |")
    return "\n".join(rows)


def test_readme_lists_all_policies():
    """In the order of `POLICIES`, and no others."""
    assert markdown_table() in README.read_text(encoding="utf-8"), (
        f"README.md, table of the policies, should be:\n{markdown_table()}"
    )


def test_text_arguments_are_typed():
    policy = get_policy("headkv", 0.3, {"window": "8", "ratio": "0.25", "accounting": "tokens"})
    assert policy == policies.HeadKV(budget=0.3, window=8, ratio=0.25, accounting="tokens")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("headvk", {}, "did you mean 'headkv'"),
        ("headkv", {"windw": "3"}, "did you mean 'window'"),
        ("headkv", {"window": "three"}, "not a whole number"),
        ("headkv", {"ratio": "much"}, "not a number"),
        ("swa", {"sinks": "3"}, "no argument 'sinks'"),
    ],
)
def test_wrong_text(name, arguments, message):
    with pytest.raises(UserError, match=message):
        get_policy(name, None, arguments)


FIELDS = [(n, f) for n, cls in POLICIES.items() for f in dataclasses.fields(cls) if f.type in KINDS]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=[f"{n}-{f.name}" for n, f in FIELDS])
def test_fields_are_what_they_say(name, field):
    """Numbers are finite and no truth values; NumPy's are numbers too."""
    cls, default = POLICIES[name], field.default
    for wrong in KINDS[field.type]:
        with pytest.raises(UserError, match=f"^policy '{name}': {field.name}="):
            cls(**{field.name: wrong})
    if field.type in (int, float):
        value = getattr(cls(**{field.name: np.array(default)[()]}), field.name)
        assert value == default and type(value) in (field.type, type(default))


def table(tmp_path, **arrays):
    np.savez(tmp_path / "keep.npz", **arrays)
    return policies.Table(path=str(tmp_path / "keep.npz"))


def keep_scale(*, k=3):
    keep = np.zeros((k, 2, 2, k), bool)
    keep[1:, :, :, 0] = True
    return keep


def test_table_plan_matches_the_file(tmp_path):
    keep = keep_scale()
    keep[2, 0, 0, 1] = True
    plan = plan_cache(GEOMETRY, table(tmp_path, keep_scale=keep))
    np.testing.assert_array_equal(plan.capacity[2], [[5, 1], [1, 1]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"keep_scale": np.zeros((3, 2, 2, 4), bool)}, "has shape"),
        ({"keep_token": np.zeros((3, 2, 3, 2, 14), bool)}, "has shape"),
        ({"keep_token": np.zeros((3, 2), bool)}, "has shape"),
        ({"keep_scale": keep_scale(), "keep_token": np.zeros((3, 2, 2, 14), bool)}, "exactly one"),
        ({"something": np.zeros(3)}, "exactly one"),
        ({"keep_scale": np.full((3, 2, 2, 3), 0.5)}, "store bool, or 0 and 1"),
        ({"keep_scale": np.full((3, 2, 2, 3), "x")}, "has type .*store bool"),
        ({"keep_scale": np.ones((3, 2, 2, 3), bool)}, "does not exist yet"),
    ],
)
def test_table_files_that_are_refused(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message):
        plan_cache(GEOMETRY, table(tmp_path, **arrays))


def test_resurrected_tokens_are_refused(tmp_path):
    keep = keep_scale()
    keep[1, 1, 0, 0] = False
    with pytest.raises(UserError, match=r"layer 1, head 0.*cannot return"):
        plan_cache(GEOMETRY, table(tmp_path, keep_scale=keep))
    rows = np.repeat(keep[..., GEOMETRY.schedule.scale_of_token][:, :, None], 4, 2)
    with pytest.raises(UserError, match="cannot return"):
        plan_cache(GEOMETRY, table(tmp_path, keep_token=rows))


@pytest.mark.parametrize("extra", [0.0, 0.02])
def test_table_pool_fits_its_budget(tmp_path, extra):
    """Rounding to blocks is charged here too: the block size shrinks until the pool fits."""
    geometry = Geometry(
        schedule=Schedule.square((1, 2, 3, 4, 6)), num_layers=3, num_heads=2, head_dim=4
    )
    rng = np.random.default_rng(0)
    keep = np.zeros((5, 3, 2, 66), bool)
    exists = np.arange(66) < np.array(geometry.schedule.starts)[:, None]
    keep[:] = exists[:, None, None] & (rng.random((3, 2, 66)) < 0.5)
    policy = table(tmp_path, keep_token=keep)
    held = plan_cache(geometry, policy).capacity.sum((1, 2)).max() / geometry.dense_tokens
    policy = dataclasses.replace(policy, budget=min(1.0, held + extra))
    plan = plan_cache(geometry, policy)
    assert plan.pool_tokens <= policy.budget * geometry.dense_tokens + 1e-6
    with pytest.raises(UserError, match="more than budget"):
        plan_cache(geometry, dataclasses.replace(policy, budget=held / 2))
    with pytest.raises(UserError, match="or smaller"):
        plan_cache(geometry, dataclasses.replace(policy, budget=held, block_size=128))


@pytest.mark.parametrize("path", ["", "nowhere.npz", __file__, "x" * 10**6])
def test_table_without_a_usable_file(path):
    with pytest.raises(UserError, match="^policy 'table'.{,300}$"):
        plan_cache(GEOMETRY, policies.Table(path=path))


def test_table_rows_without_guidance(tmp_path):
    """Only the conditional rows of the file count."""
    keep = np.zeros((3, 2, 4, 2, 14), bool)
    keep[1:, ..., 0] = keep[2, :, 2:, :, 1:5] = True
    alone = dataclasses.replace(GEOMETRY, rows_per_image=1)
    plan = plan_cache(alone, table(tmp_path, keep_token=keep))
    assert plan.capacity.max() == 1
    inputs = plan.rule.inputs(alone, plan.allocation, np.array([1]))
    chex.assert_shape(inputs, (3, 2, 1, 2, 14))
    assert inputs[:2, ..., 0].all() and inputs.sum() == 8


def test_table_rows_must_fit_the_run(tmp_path):
    policy = table(tmp_path, keep_token=np.zeros((3, 2, 4, 2, 14), bool))
    policy.check_images(2)
    with pytest.raises(UserError, match="two per image"):
        policy.check_images(3)
