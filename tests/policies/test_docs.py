"""What docs/ says of policies: programs run, every policy and argument is named."""

import dataclasses
import inspect
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests import models_under_test as models
from tests.policies.observations import DEMO, kept_columns, observation
from tests.tokens import stand_in
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.policies import POLICIES, Policy, capacities, get_policy, masks, registry

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "reference" / "policies.md").read_text("utf-8")


def programs(page: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


EXAMPLE, RULE_EXAMPLE = programs("howto/own_policy.md")
BOTH = f"{EXAMPLE}\n\n{RULE_EXAMPLE}"
(ABLATIONS,) = programs("howto/reproduce.md")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setattr(registry, "POLICIES", dict(registry.POLICIES))
    exec(compile(BOTH, "own_policy.md", "exec", dont_inherit=True), {"__name__": "example"})
    return registry.get_policy("best_attended", 0.3)


@pytest.mark.slow
def test_it_fits_its_budget_and_changes_little(example):
    model = models.fixture_model("b_k6_sharedaln")
    generator = models.greedy_generator(model, example, segments=models.LAST_ALONE)
    results, state = generator.run_batch([3, 7], [0, 1])
    assert state.kv_pool.nbytes <= 0.3 * generator.plan.dense_bytes(2, "float32")
    held = (np.asarray(state.position) >= 0).sum(1)
    assert (held == generator.plan.capacity[-1].sum()).all()
    full, _ = models.greedy_generator(model).run_batch([3, 7], [0, 1])
    assert 0.3 < (np.asarray(results["tokens"]) == np.asarray(full["tokens"])).mean() < 1


def test_the_example_on_tokens(example):
    """It keeps to its budget and decides on the device: what the newest stage attends to most."""
    plan = stand_in.plan_for(dataclasses.replace(example, budget=0.4))
    model = stand_in.StandIn.random(plan.geometry, 2)
    out, state = stand_in.run(model, plan)
    assert np.isfinite(out).all()
    assert plan.num_bytes(1, "float32") <= 0.4 * plan.dense_bytes(1, "float32")
    for cache in state:
        held = (np.asarray(cache.position) >= 0).sum(-1)
        assert (held <= plan.layer_slots[0]).all() and held.max() > 0.6 * plan.layer_slots[0]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", ["scales", "tokens"])
def test_one_selection_for_both_kinds(example, kind, ties):
    """Of equals the earlier candidate stays scale by scale, the newer token token by token. The
    page of the core shows the same policy."""
    assert EXAMPLE in (ROOT / "varjax" / "core" / "README.md").read_text("utf-8")
    obs = observation(1, 7)
    mass = jnp.where(obs.live, jnp.float32(1), 0) if ties else obs.scale_mass
    obs = dataclasses.replace(obs, scale_mass=mass, by_position=kind == "tokens")
    kept = kept_columns(example.rule(kind).select(obs))
    for head, columns in kept.items():
        live, position, score = (np.asarray(a)[head] for a in (obs.live, obs.position, mass))
        newest_first = (-position) if kind == "tokens" else np.arange(live.size)
        order = sorted(np.flatnonzero(live), key=lambda c: (-score[c], newest_first[c]))  # noqa: B023
        assert columns == set(order[:7])


def test_the_example_of_a_rule(example):
    """The first layers hold twice as much, and all together at most the budget; no tokens."""
    policy = registry.get_policy("wide_start", 0.2, {"first": "1", "block_size": "1"})
    plan = plan_cache(DEMO, policy)
    held = plan.capacity[-1, :, 0]
    assert held[0] >= 2 * held[1] - 1 and held.sum() <= 0.2 * 66 * 3
    with pytest.raises(UserError, match="does not serve models that draw token by token"):
        stand_in.plan_for(policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "seen"),
    [
        ("condensed", [[], [], [], [2], [2, 3], [2, 3, 4]]),
        ("local", [[], [0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]),
        ("intermediate", [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3, 4]]),
    ],
)
def test_amskv_ablations(group, seen, tmp_path, monkeypatch):
    """The files of AMS-KV's Table 1 say what `amskv` with an argument `remove` once kept."""
    monkeypatch.chdir(tmp_path)
    written = {}
    exec(compile(ABLATIONS, "reproduce.md", "exec", dont_inherit=True), written)
    geometry = written["geometry"]
    plan = plan_cache(geometry, get_policy("table", None, {"path": f"without_{group}.npz"}))
    for s, scales in enumerate(seen):
        visible = plan.allocation.visible(geometry, s)
        expected = np.isin(geometry.schedule.scale_of_token, scales)
        np.testing.assert_array_equal(visible, np.broadcast_to(expected, visible.shape))


def helpers() -> str:
    """What docs/howto/own_policy.md lists: each function's arguments and first sentence."""
    lines = []
    for module in (masks, capacities):
        for name, function in vars(module).items():
            own = inspect.isfunction(function) and function.__module__ == module.__name__
            if own and name[0] != "_":
                found = inspect.signature(function).parameters.values()
                plain = [p.replace(annotation=inspect.Parameter.empty) for p in found]
                words = " ".join(function.__doc__.split()).split(". ")[0].split("; ")[0].rstrip(".")
                of = f"{module.__name__.split('.')[-1]}.{name}{inspect.Signature(plain)}"
                lines.append(f"- `{of}`: {words}")
    return "\n".join(lines)


def test_every_mask_is_listed():
    page = (DOCS / "howto" / "own_policy.md").read_text("utf-8")
    listed = page.split("of `varjax.policies`; R rows, N heads, K candidates.\n\n")[1]
    assert listed.split("\n\n")[0] == helpers(), f"paste this:\n{helpers()}"


def section(title: str) -> str:
    """The text of the reference from this heading to the next one."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_in_the_table(name):
    row = f"| `{name}` | what it looks at |"
    assert f"\n| `{name}` | " in section("All of them"), (
        f"docs/reference/policies.md, section 'All of them', has no row for it; for example:\n{row}"
    )


@pytest.mark.parametrize("name", POLICIES)
def test_every_argument_is_named(name):
    shared = {f.name for f in dataclasses.fields(Policy)}
    fields = [f.name for f in dataclasses.fields(POLICIES[name]) if f.name[0] != "_"]
    own = [n for n in fields if n not in shared and n != "parts"]
    entries = dict(re.findall(r"^- `(\w+)`: (.*(?:\n  .*)*)", section("Arguments"), re.MULTILINE))
    entry = f"- `{name}`: {', '.join(f'`{n}`' for n in own)}"
    assert name in entries, (
        f"docs/reference/policies.md, section 'Arguments', lacks it; for example:\n{entry}"
    )
    assert not {n for n in own if f"`{n}`" not in entries[name]}
