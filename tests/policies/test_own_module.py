"""Policies of a user's own module: loaded by path or import name, and what is said if they cannot
be."""

import contextlib
import dataclasses
import sys

import pytest

from tests.policies.observations import DEMO
from tests.policies.test_docs import EXAMPLE
from tests.policies.test_registry import markdown_table
from varjax import policies
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.policies import POLICIES, Policy, get_policy, load_module, registry
from varjax.policies.scale_rule import ScaleRule
from varjax.storage import own_modules


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers and imports is gone after it."""
    monkeypatch.setattr(own_modules, "_LOADED", {})
    known, modules = dict(POLICIES), set(sys.modules)
    yield
    POLICIES.clear()
    POLICIES.update(known)
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder, text: str, name: str = "my_policies.py") -> str:
    (folder / name).write_text(text, "utf-8")
    return str(folder / name)


def test_a_file_anywhere(tmp_path):
    path = write(tmp_path, EXAMPLE)
    assert load_module(path) == ("best_attended",) == load_module(tmp_path / "my_policies.py")
    policy = get_policy("best_attended", 0.2, {"block_size": "4"})
    assert policy.budget == 0.2 and policy.needs.scale_mass and hash(policy)
    assert "`best_attended` | best attended tokens | both | decided" in markdown_table()


def test_an_import_name(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine", EXAMPLE, "policy.py")
    write(tmp_path / "mine", "from mine import policy", "__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_module("mine") == ("best_attended",) == load_module("mine.policy")
    assert load_module("varjax.policies.h2o") == ("h2o",)  # already imported


TAKEN = EXAMPLE.replace("best_attended", "h2o")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", r"my_policies\.py, line 1: '\(' was never closed"),
        ("import no_such_module", "line 1: ModuleNotFoundError: .*no_such_module"),
        (TAKEN, r"'h2o' is registered already \(varjax\.policies\.h2o\.H2O\): rename yours"),
        (EXAMPLE + "\n1 / 0", "ZeroDivisionError"),
        ("x = 1", "registers no policy"),
        ("raise ValueError('one\\n  two\\nthree')", "line 1: ValueError: one two three$"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, message):
    """Twice the same, and nothing stays behind."""
    path, known = write(tmp_path, text), dict(POLICIES)
    for _ in range(2):
        with pytest.raises(UserError, match=f"policy module .*my_policies.py: .*{message}"):
            load_module(path)
    assert known == POLICIES and POLICIES["h2o"] is policies.H2O


@pytest.mark.parametrize("name", [None, "", "../$x$", "a,b", "a\n", "x" * 65])
def test_names_that_nobody_can_type(name):
    with pytest.raises(UserError, match=r"^@register\(.*\) on .*H2O.*: give a name of"):
        registry.register(name)(policies.H2O)
    assert policies.H2O.name == "h2o"
    with pytest.raises(UserError, match=r"^@register\('zz'\) on .*: it is no policy"):
        registry.register("zz")(int)
    with pytest.raises(UserError, match=r"^@register\('zz'\) on .*: it serves no kind of models"):
        registry.register("zz")(Policy)


@pytest.mark.parametrize(
    ("error", "raised"), [("KeyboardInterrupt", KeyboardInterrupt), ("SystemExit(3)", UserError)]
)
def test_an_interrupted_import_leaves_nothing(tmp_path, error, raised):
    path = write(tmp_path, f"{EXAMPLE}\nraise {error}")
    with pytest.raises(raised):
        load_module(path)
    assert "best_attended" not in POLICIES and not own_modules._LOADED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere/my.py", "no such file"),
        ("./notes.txt", "has to end in .py"),
        ("no_such_module", "no module of this name"),
        ("varjax.core.sequence", "registers no policy"),
    ],
)
def test_what_is_no_module(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x = 1")
    with pytest.raises(UserError, match=message):
        load_module(given)


class Undecided(Policy):
    """Leaves it open which tokens stay."""

    rules = (ScaleRule,)


class NoRoom(ScaleRule):
    """Allocates nothing."""

    def allocate(self, geometry, budget):
        return None


class Nothing(Policy):
    rules = (NoRoom,)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Undecided(budget=0.5), "leaves it open which tokens stay, but there is no `select`"),
        (Nothing(budget=0.5), "result of `allocate`.*None.*give a StaticAllocation or Region"),
    ],
)
def test_rules_that_lack_something(policy, message):
    with pytest.raises(UserError, match=message):
        plan_cache(DEMO, policy)
    with contextlib.suppress(UserError):  # with room for everything nothing has to be chosen
        assert not plan_cache(DEMO, dataclasses.replace(policy, budget=1.0)).chooses
