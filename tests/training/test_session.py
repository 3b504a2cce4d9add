"""Whole runs of a tiny model: losses fall, killed runs resume exactly, bad folders are refused."""

import json

import chex
import pytest

from varjax.errors import UserError
from varjax.storage import checkpoint, manifest
from varjax.training import loop, session
from varjax.training.vqvae_trainer import VQVAEStage

EVERY = loop.Intervals(log=2, checkpoint=16, validate=20)


def _history(out, stage: str) -> list[dict]:
    """Log entries without timings."""
    lines = (out / stage / "history.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [{k: v for k, v in e.items() if k != "images_per_second"} for e in entries]


class Killed(Exception):
    pass


def _kill_at(monkeypatch, step: int):
    """Let the codec's training die when step `step` begins."""
    original = VQVAEStage.step

    def dying(self, state, n):
        if n == step:
            raise Killed
        return original(self, state, n)

    monkeypatch.setattr(VQVAEStage, "step", dying)


def test_losses_fall_and_the_model_loads(tiny, tmp_path, capsys):
    settings, out = tiny(), tmp_path / "run"
    model = session.train(settings, "both", out, EVERY)
    for stage in ("vqvae", "var"):
        history = _history(out, stage)
        assert [e["step"] for e in history] == list(range(2, 41, 2))
        assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    codec, var = (_history(out, stage)[-1]["validation"] for stage in ("vqvae", "var"))
    assert codec["codes_used"] > 8 and codec["psnr"] > 9
    assert len(var["per_scale"]) == 3
    chex.assert_tree_all_finite(var["per_scale"])
    assert "vqvae 40/40  loss" in capsys.readouterr().err
    parts, described = checkpoint.load(model)
    assert parts["codec"].config == settings.codec and described["sampling"]["top_k"] == 32
    assert parts["transformer"].config == settings.transformer(4)


def test_killed_run_resumes_exactly(tiny, tmp_path, monkeypatch):
    """The losses of a run that died at step 18 equal those of one that did not, to the last bit."""
    settings = tiny()
    session.train(settings, "vqvae", tmp_path / "whole", EVERY, quiet=True)
    with monkeypatch.context() as patch:
        _kill_at(patch, 18)
        with pytest.raises(Killed):
            session.train(settings, "vqvae", tmp_path / "killed", EVERY, quiet=True)
    assert _history(tmp_path / "killed", "vqvae")[-1]["step"] == 18  # two past the checkpoint
    session.train(settings, "vqvae", tmp_path / "killed", EVERY, quiet=True)
    assert _history(tmp_path / "killed", "vqvae") == _history(tmp_path / "whole", "vqvae")


def test_stages_one_after_the_other(tiny, tmp_path):
    settings, out = tiny(), tmp_path / "run"
    assert session.train(settings, "vqvae", out, EVERY, quiet=True) is None
    model = session.train(settings, "var", out, EVERY, quiet=True)
    assert manifest.read(model)["training"]["pictures"] == 61
    again = session.train(settings, "both", out, EVERY, quiet=True)  # nothing left to do
    assert again == model and [e["step"] for e in _history(out, "var")] == list(range(2, 41, 2))


def test_refused_folders(tiny, tmp_path):
    settings = tiny()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds no training run to resume"):
        session.train(settings, "both", tmp_path / "other", EVERY)
    with pytest.raises(UserError, match="holds no trained codec"):
        session.train(settings, "var", tmp_path / "new", EVERY)
    for out, match in (("", "is no folder"), ("a\0b", "NUL byte"), (settings.data + "/x", "not a")):
        with pytest.raises(UserError, match=match):
            session.train(settings, "both", out, EVERY)
    folder = tmp_path / "run" / "vqvae"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(tiny(ch=16).of_stage("vqvae")))
    with pytest.raises(UserError, match="other settings: ch was 16, now 8"):
        session.train(settings, "both", tmp_path / "run", EVERY)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["discs.npz", "other", "run"]


WRONG = {
    "size": ({"image_size": 16}, "makes 8 pixels"),
    "sides": ({"patch_nums": (1, 2, 2, 4)}, "--patch_nums=1,2,2,4 given: sides must increase"),
    "data": ({"data": ""}, "--data is required"),
    "heads": ({"heads": 3}, "embed_dim 32 is not a multiple of num_heads 3"),
    "groups": ({"ch": 10}, "normalisation groups do not divide"),
    "warm-up": ({"autoencoder_steps": 40}, "the quantiser would never be trained"),
    "steps": ({"var_steps": 0}, "0 training steps given"),
    "dtype": ({"dtype": "float8"}, "unknown dtype 'float8'"),
    "seed": ({"seed": 2**31}, "--seed=2147483648 given"),
    "codes": ({"vocab_size": 1}, "--vocab_size=1 given: at least 2 codes"),
    "lr": ({"vqvae_lr": float("inf")}, "learning rate inf given"),
    "lr NaN": ({"var_lr": float("nan")}, "learning rate nan given"),
    "decay": ({"weight_decay": -0.1}, "weight decay -0.1 given"),
    "decay NaN": ({"weight_decay": float("nan")}, "weight decay nan given"),
    "many steps": ({"var_steps": 10**12}, "at most"),
    "batch": ({"var_batch_size": 0}, "at least 1"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_settings(tiny, changes, message):
    with pytest.raises(UserError, match=message):
        tiny(**changes)


@pytest.mark.parametrize("name", ["vqvae_batch_size", "var_batch_size"])
def test_batches_larger_than_the_data(tiny, tmp_path, name):
    with pytest.raises(UserError, match=f"--{name}=62 given, but there are 61 training pictures"):
        session.train(tiny(**{name: 62}), "both", tmp_path / "run", EVERY)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, ""])
def test_damaged_settings(tiny, tmp_path, text):
    folder = tmp_path / "run" / "vqvae"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(text)
    with pytest.raises(UserError, match="settings.json is damaged"):
        session.train(tiny(), "both", tmp_path / "run", EVERY)


def test_intervals_must_fit():
    with pytest.raises(UserError, match="--checkpoint_every=30 must be a multiple of --log_every"):
        loop.Intervals(log=20, checkpoint=30)


def test_divergence_is_reported(tiny, tmp_path):
    with pytest.raises(UserError, match="training has diverged"):
        session.train(tiny(vqvae_lr=1e30), "vqvae", tmp_path / "run", EVERY, quiet=True)
