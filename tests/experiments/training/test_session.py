"""Whole runs of a tiny model: losses fall, killed runs resume exactly, bad folders are refused."""

import json
import os
import shutil
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from experiments import images
from experiments.training import data, loop, session, sheets
from experiments.training.var_trainer import VARStage
from experiments.training.vqvae_trainer import VQVAEStage
from tests.experiments.training.conftest import dies_at, history
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.storage import checkpoint
from varjax.storage.pictures import read_picture

EVERY = {"log_every": 2, "checkpoint_every": 16, "validate_every": 20, "sample_every": 20}


@pytest.fixture(scope="module")
def whole(shared_tiny, tmp_path_factory):
    """(settings, folder, model) of a run, one stage after the other. Every step of a kind is one
    program."""
    settings, out = shared_tiny(**EVERY), tmp_path_factory.mktemp("run") / "whole"
    chex.clear_trace_counter()
    with pytest.MonkeyPatch.context() as patch:
        for programs, function in (
            (VQVAEStage, "_loss"),  # the autoencoder, then with its quantiser
            (VARStage, "_predict"),  # training, then validation
        ):
            counted = chex.assert_max_traces(getattr(programs, function), n=2)
            patch.setattr(programs, function, counted)
        once = chex.assert_max_traces(sheets.Generator.compile, n=1)
        patch.setattr(sheets.Generator, "compile", once)
        assert session.train(settings, "vqvae", out, quiet=True) is None
        return settings, out, session.train(settings, "var", out, quiet=True)


def test_losses_fall_and_the_model_loads(whole):
    settings, out, model = whole
    for stage in ("vqvae", "var"):
        logged = history(out, stage)
        assert [e["step"] for e in logged] == list(range(2, 41, 2))
        assert logged[-1]["loss"] < 0.9 * logged[0]["loss"]
    codec, var = (history(out, stage)[-1]["validation"] for stage in ("vqvae", "var"))
    assert codec["codes_used"] > 8 and codec["psnr"] > 9
    assert len(var["per_scale"]) == 3 and np.isfinite(var["per_scale"]).all()
    parts, described = checkpoint.load(model, registry.CATALOGUE)
    assert parts["codec"].config == settings.codec and described["sampling"]["top_k"] == 32
    assert parts["transformer"].config == settings.transformer(4)


def test_a_run_shows_itself(whole):
    """Originals lie above their reconstructions, and a class has a row of samples. The second sheet
    is drawn with later weights. The history is a table, too."""
    settings, out, _ = whole
    drawn = {}
    for name in ("vqvae/reconstructions", "var/samples"):
        files = sorted((out / name).iterdir())
        assert [file.name for file in files] == ["000020.png", "000040.png"]
        drawn[name] = [read_picture(file, file.name) for file in files]
        assert (drawn[name][0] != drawn[name][1]).any()
    held, (_, sheet) = data.load(settings.data, 8).val, drawn["vqvae/reconstructions"]
    np.testing.assert_array_equal(sheet[:8], images.grid(held, columns=len(held)))
    assert 0 < np.abs(sheet[:8].astype(int) - sheet[-8:]).mean() < 70
    assert drawn["var/samples"][1].shape[0] == 4 * (8 + images.CAPTION_HEIGHT + 2) - 2
    assert len((out / "vqvae" / "history.csv").read_text().splitlines()) == 21


def test_killed_run_resumes_exactly(whole, tmp_path, capsys):
    """The losses of a run that died at step 18 equal those of one that did not, to the last bit."""
    settings, out, _ = whole
    with dies_at(VQVAEStage, 18):
        session.train(settings, "vqvae", tmp_path / "killed", quiet=True)
    assert history(tmp_path / "killed", "vqvae")[-1]["step"] == 18  # two past the checkpoint
    session.train(settings, "vqvae", tmp_path / "killed")
    assert history(tmp_path / "killed", "vqvae") == history(out, "vqvae")
    assert "vqvae 40/40  " in capsys.readouterr().err


def test_a_run_that_was_asked_to_end_goes_on_exactly(whole, tmp_path, monkeypatch):
    """By SIGTERM between two log lines: no line averages fewer steps."""
    settings, out, _ = whole
    step = VQVAEStage.step

    def asked(self, state, n):
        if n == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, state, n)

    with monkeypatch.context() as patch:
        patch.setattr(VQVAEStage, "step", asked)
        with pytest.raises(loop.Stopped, match="21 of 40 steps are stored"):
            session.train(settings, "vqvae", tmp_path / "asked", quiet=True)
    session.train(settings, "vqvae", tmp_path / "asked", quiet=True)
    assert history(tmp_path / "asked", "vqvae") == history(out, "vqvae")


def test_a_finished_model_stays_as_it_is(whole):
    """With what was added to it."""
    settings, out, model = whole
    _, described = checkpoint.describe(model, registry.CATALOGUE)
    assert described["training"]["pictures"] == 61
    (model / "calibration.json").write_text("{}")
    before = {p: p.stat().st_mtime_ns for p in model.rglob("*")}
    assert session.train(settings, "both", out, quiet=True) == model
    assert {p: p.stat().st_mtime_ns for p in model.rglob("*")} == before
    assert [e["step"] for e in history(out, "var")] == list(range(2, 41, 2))


def test_sigterm_in_the_last_step_of_the_codec(whole, tmp_path, monkeypatch):
    """The transformer is not begun."""
    settings, out, _ = whole
    out = shutil.copytree(out, tmp_path / "run", ignore=lambda *_: ["model"])
    steps = loop._loop

    def asked(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return steps(*arguments)

    monkeypatch.setattr(loop, "_loop", asked)
    with pytest.raises(loop.Stopped, match="vqvae: 40 of 40 steps are stored: resume"):
        session.train(settings, "both", out, quiet=True)


def test_refused_folders(tiny, tmp_path):
    settings = tiny()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds no training run to resume"):
        session.train(settings, "both", tmp_path / "other")
    with pytest.raises(UserError, match="holds no trained codec"):
        session.train(settings, "var", tmp_path / "new")
    for out, match in (("", "is no folder"), ("a\0b", "NUL byte"), (settings.data + "/x", "not a")):
        with pytest.raises(UserError, match=match):
            session.train(settings, "both", out)
    folder = tmp_path / "run" / "vqvae"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(tiny(ch=16).deciding("vqvae")))
    with pytest.raises(UserError, match="other settings: ch was 16, now 8"):
        session.train(settings, "both", tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["discs.npz", "other", "run"]


WRONG = {
    "size": ({"image_size": 16}, "makes 8 pixels"),
    "sides": ({"patch_nums": (1, 2, 2, 4)}, "patch_nums=1,2,2,4 given: sides must increase"),
    "heads": ({"heads": 3}, "embed_dim 32 is not a multiple of num_heads 3"),
    "warm-up": ({"autoencoder_steps": 40}, "the quantiser would never be trained"),
    "steps": ({"var_steps": 0}, "var_steps=0 given: choose 1 to 1000000000"),
    "dtype": ({"dtype": "float8"}, "unknown dtype 'float8'"),
    "seed": ({"seed": 2**31}, "seed=2147483648 given: choose 0 to 2147483647"),
    "lr": ({"vqvae_lr": float("inf")}, "vqvae_lr=inf given"),
    "interval": (
        {"log_every": 20, "checkpoint_every": 30},
        "checkpoint_every=30 must be a multiple of log_every=20",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_settings(tiny, changes, message):
    with pytest.raises(UserError, match=message):
        tiny(**changes)


@pytest.mark.parametrize("text", ["[1]", ""])
def test_damaged_settings(tiny, tmp_path, text):
    folder = tmp_path / "run" / "vqvae"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(text)
    with pytest.raises(UserError, match="settings.json"):
        session.train(tiny(), "both", tmp_path / "run")


class Diverging:
    """A stage whose third step has a loss that is no number."""

    name, steps, batch_size, draw, phases = "vqvae", 8, 1, None, {}
    shapes = {"weight": jax.ShapeDtypeStruct((2,), jnp.float32)}

    def __init__(self, settings):
        self.settings = settings

    def first_state(self):
        return {"weight": jnp.zeros(2)}

    def places(self, state):
        return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), state)

    def step(self, state, n):
        return state, {"loss": jnp.asarray(np.nan if n == 2 else 1.0)}


def test_divergence_is_reported(tiny, tmp_path):
    message = "loss is nan at step 4, training has diverged: .* a lower vqvae_lr"
    with pytest.raises(UserError, match=message):
        loop.run(Diverging(tiny(**EVERY)), tmp_path / "run", quiet=True)
    assert [e["step"] for e in history(tmp_path / "run", "vqvae")] == [2]


def test_the_place_of_the_model_is_checked_first(tiny, tmp_path, monkeypatch):
    """Not when everything is trained."""
    monkeypatch.setattr(loop, "check_folder", lambda *a: None)
    out = tmp_path / "run"
    (out / "model").mkdir(parents=True)
    (out / "model" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="holds 'thesis.txt' and is not replaced"):
        session.train(tiny(), "both", out)
