"""`experiments.learn`: tables that beat their start, resumed exactly, for one model only."""

import errno
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.evaluation.metrics import image_kl
from experiments.training import learner, turning
from tests import models_under_test as models
from tests.models import test_gates
from tests.models.test_gates import PERIOD, TOKENS
from varjax.calibration import files as calibrations
from varjax.core import layers
from varjax.core.planner import plan_cache
from varjax.models.loading import load
from varjax.policies import Learned

BUDGETS, STEPS = "0.1,0.3", 8
SMALL = ("--num_samples=8", f"--steps={STEPS}", "--batch_size=4", f"--budgets={BUDGETS}")


@pytest.fixture(scope="module")
def folder():
    return models.checkpoint_folder("b_k6_sharedaln")


@pytest.fixture
def written(call, folder, tmp_path_factory, monkeypatch):
    """(the file, what the command printed); written once. The disk is full when it shall be written
    first: nothing half-written is left, and the same command has nothing to learn again."""
    path = tmp_path_factory.getbasetemp() / "learned-test" / "learned.npz"
    told, arguments = path.with_suffix(".txt"), (f"--checkpoint={folder}", *SMALL, f"--out={path}")
    if not path.exists():
        path.parent.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(np, "savez_compressed", full)
            status, out, first = call("learn", *arguments)
            assert status != 0 and "No space left" in first
            assert [p.name for p in path.parent.iterdir()] == ["learned.npz.partial"]
        with monkeypatch.context() as patch:
            patch.setattr(learner.Learner, "step", None)
            status, out, err = call("learn", *arguments)
        assert status == 0, err
        assert [p.name for p in path.parent.iterdir()] == ["learned.npz"]
        told.write_text(out + first)
    return path, told.read_text()


def full(*a, **k):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_tables_lose_less_than_their_start(written, folder):
    path, told = written
    assert "validation KL" in told and "| budget | knapsack | learned |" in told
    assert not path.with_name(f"{path.name}.partial").exists()
    model = load(folder, "float32")
    found = calibrations.load(path, model.geometry)
    assert list(found.learned) == [0.1, 0.3] and found.num_samples == 8
    about = json.loads(str(np.load(path)["about"]))
    assert about["steps"] == STEPS and "jax" in about["versions"]
    for knapsack, learned in zip(*about["held_back"].values(), strict=True):
        assert learned < knapsack
    for budget in (0.05, 0.1, 0.3, 0.8):  # of one table, of the next larger, above all of them
        plan = plan_cache(model.geometry, Learned(budget=budget), found)
        assert plan.static_content and plan.pool_tokens <= budget * model.geometry.dense_tokens
        assert plan.policy.table is found.learned[0.1 if budget < 0.2 else 0.3]


def test_tables_of_stages(call, tmp_path):
    """Token by token: the engine keeps to the budget, and its divergence is that of the gates. The
    period of a table is that of its stages."""
    out, budget = tmp_path / "learned.npz", 0.4
    flags = (
        "--num_samples=8",
        "--steps=3",
        "--batch_size=4",
        f"--budgets={budget}",
        f"--out={out}",
    )
    flags += (f"--checkpoint={models.checkpoint_folder(TOKENS[0])}", f"--period={PERIOD}")
    status, _, err = call("learn", *flags)
    assert status == 0 and "validation KL" in err, err
    model, sampling, full = test_gates.drawn(TOKENS[0])
    geometry = model.geometry_for(sampling)
    plan = plan_cache(geometry, Learned(budget=budget), calibrations.load(out, geometry))
    assert plan.policy.period == PERIOD
    assert plan.num_bytes(2, "float32") <= budget * plan.dense_bytes(2, "float32")
    engine = test_gates.run(model, sampling, None, full["tokens"], plan=plan)["logits"]
    room = int(plan.allocation.slots[0]) - PERIOD
    last_use = plan.rule.last_uses(plan.policy.gain, geometry, room)
    table = last_use >= np.arange(1 + len(plan.policy.table))[:, None, None, None]
    gated = test_gates.forced(model, sampling, full["tokens"], table)
    expected = image_kl(full["logits"], engine)
    assert expected.min() > 1e-3
    np.testing.assert_allclose(image_kl(full["logits"], gated), expected, atol=1e-4)


@pytest.mark.slow
def test_a_killed_run_gives_the_same_file(written, call, folder, tmp_path, monkeypatch):
    """Killed in the second budget, past a save."""
    path, out = written[0], tmp_path / "again.npz"
    step, steps = learner.Learner.step, []

    def dies(self, state, n):
        steps.append((self.name, n))
        if len(steps) == STEPS + 4:
            raise KeyboardInterrupt
        return step(self, state, n)

    arguments = (f"--checkpoint={folder}", *SMALL, f"--out={out}")
    with monkeypatch.context() as patch:
        patch.setattr(learner.Learner, "step", dies)
        assert call("learn", *arguments)[0] != 0
    assert not out.exists() and steps[-1] == ("budget-0.3", 3)
    status, _, err = call("learn", *arguments[:-1], f"--out={out}", "--seed=1")
    assert status == 2 and "seed was 0, now 1" in err
    status, _, err = call("learn", *arguments)
    assert status == 0 and f"budget-0.3: resuming after step 3 of {STEPS}" in err, err
    np.testing.assert_array_equal(np.load(path)["seen"], np.load(out)["seen"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--budgets=0.00001",), "budget=1e-05 is too small"),
        (("--checkpoint=demo-llamagen", "--budgets=0.03"), "the buffer of a stage (8)"),
        (("--checkpoint=demo-llamagen", "--period=9999"), "period=9999 must be 1 to 254"),
        (("--period=8",), "is for models that draw token by token"),
        (("--budgets=0.1,2",), "2 is outside (0, 1]"),
        (("--num_samples=0",), "num_samples"),
        (("--mesh=data=64",), "takes 64 devices"),
        (("--out=nowhere/learned.npz",), "there is no folder"),
    ],
)
def test_what_it_refuses(refused, flags, message):
    refused("learn", message, "--out=learned.npz", *flags)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_digest": "0" * 64}, "other weights .* experiments.learn"),
        ({"guidance": 3.0}, "made with guidance cfg=3, this run uses cfg=1.5"),
        ({"schedule": "1x1;2x2"}, "another model: its schedule"),
        ({"budgets": [0.1]}, "list one for each of 2 tables"),
        ({"budgets": [0.1, float("nan")]}, "budget"),
        ({"seen": np.zeros((2, 5), np.uint8)}, "is uint8 .5,., not uint8 .5, "),
        ({"seen": lambda seen: seen * np.nan}, "is float64"),
        ({"seen": lambda seen: seen * 0}, "nothing but zeros"),
        ({"seen": np.uint8(1)}, "it holds no learned tables"),
        ({"about": "{no JSON"}, "it holds no learned tables"),
        ({"budgets": [0.1, 0.1]}, "each has one table"),
        (None, "there is no file|cannot read the file"),
    ],
)
def test_files_that_are_refused(written, call, folder, tmp_path, change, message):
    """Before anything is compiled: by a run, and by planning."""
    arrays, path = dict(np.load(written[0])), tmp_path / "other.npz"
    if change is not None:
        for name, value in change.items():
            if name in arrays:
                arrays[name] = value(arrays[name]) if callable(value) else np.array(value)
            else:
                arrays["about"] = np.array(json.dumps(json.loads(str(arrays["about"])) | change))
        np.savez(path, **arrays)
    flags = ("--policy=learned", "--budget=0.3", "--labels=1", f"--learned={path}", "--dry_run")
    status, _, err = call("run", f"--checkpoint={folder}", *flags)
    assert status == 2, err
    assert re.search(message, err), err


def test_the_file_in_the_checkpoint_folder(written, call, folder, tmp_path):
    """It is taken, for its own guidance."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    flags = (f"--checkpoint={own}", "--policy=learned", "--budget=0.3", "--labels=1", "--dry_run")
    status, _, err = call("run", *flags)
    assert status == 2 and "`python -m experiments.learn` writes learned.npz" in err
    shutil.copy(written[0], own / "learned.npz")
    assert call("run", *flags)[0] == 0
    status, _, err = call("run", *flags, "--cfg=3")
    assert status == 2 and "learned.npz: the calibration was made with guidance cfg=1.5" in err


# --- the mathematics ---


@pytest.mark.parametrize("group", [1, 2])
def test_the_derivative_by_a_gate_is_the_effect_of_turning_it(group):
    """Where the loss is linear in what attention gives; all other derivatives are usual."""
    rng, keys = np.random.default_rng(0), 6
    q, along = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(2, 3, 4, 5))
    k, v = rng.normal(size=(2, 2, 4 // group, keys, 5))
    arrays = tuple(map(jnp.float32, (q, k, v)))
    mask, is_open = (rng.random(size) < 0.7 for size in ((2, 1, 3, keys), k.shape[:3]))
    mask[..., -1] = is_open[..., -1] = True
    mask = jnp.asarray(mask)

    def loss(logs, q, k, v, attention=turning.attention):
        q = jnp.pad(q, [(0, 0)] * 3 + [(0, 1)], constant_values=1)
        return (attention(q, jnp.concatenate([k, logs[..., None]], -1), v, mask) * along).sum()

    def logs(is_open):
        return jnp.log(jnp.where(is_open, 1, turning.SHUT))

    effects, *found = jax.grad(loss, (0, 1, 2, 3))(logs(is_open), *arrays)
    usual = jax.grad(loss, (1, 2, 3))(logs(is_open), *arrays, layers.dense_attention)
    for one, other in zip(found, usual, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    for place in np.ndindex(*is_open[..., :-1].shape):
        one = np.zeros_like(is_open)
        one[place] = True
        opened, shut = (loss(logs(gates), *arrays) for gates in (is_open | one, is_open & ~one))
        np.testing.assert_allclose(effects[place], opened - shut, atol=1e-4)
