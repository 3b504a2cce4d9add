"""A tiny LlamaGen is trained, stopped, continued, loaded and drawn with; where data lies."""

import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from experiments.training import session
from experiments.training.settings import TrainingSettings
from experiments.training.var_trainer import LlamaGenStage
from tests.experiments.training.conftest import dies_at, history
from varjax.core.errors import UserError
from varjax.models import registry, teacher_forcing
from varjax.storage import checkpoint

TINY = {
    **{"image_size": 4, "ch": 32, "ch_mult": (1,), "vocab_size": 16, "z_channels": 4},
    **{"vqvae_steps": 24, "vqvae_batch_size": 8, "vqvae_lr": 3e-3, "autoencoder_steps": 8},
    **{"depth": 2, "width": 32, "heads": 2, "var_steps": 24, "var_batch_size": 8, "var_lr": 1e-2},
    **{
        "reseed_every": 4,
        "shifts": 1,
        "log_every": 4,
        "checkpoint_every": 12,
        "validate_every": 12,
        "sample_every": 0,
    },
}


def _settings(pictures, **changes) -> TrainingSettings:
    return TrainingSettings.for_family("llamagen", data=str(pictures), **TINY | changes)


@pytest.fixture(scope="module")
def whole(shared_tiny, tmp_path_factory):
    """(settings, folder, model) of a run."""
    out = tmp_path_factory.mktemp("llamagen") / "run"
    settings = _settings(shared_tiny().data, save_dtype="bfloat16")
    return settings, out, session.train(settings, "both", out, quiet=True)


@pytest.mark.slow
def test_losses_fall_and_the_codebook_lives(whole):
    settings, out, _ = whole
    for name in ("vqvae", "var"):
        logged = history(out, name)
        assert [entry["step"] for entry in logged] == list(range(4, 25, 4))
        assert logged[-1]["loss"] < 0.95 * logged[0]["loss"]
    codec, transformer = (history(out, name)[-1]["validation"] for name in ("vqvae", "var"))
    assert codec["codes_used"] > 4 and codec["psnr"] > 8
    assert len(transformer["per_quarter"]) == 4 and np.isfinite(transformer["loss"])
    tokens = np.load(out / "var" / "tokens.npz")["train"]
    assert tokens.shape == (2, 122, 16) and len(np.unique(tokens)) > 4


@pytest.mark.slow
def test_the_model_draws_pictures(whole):
    settings, _, folder = whole
    model = varjax.load(folder)
    assert model.family.name == "llamagen" and model.config == settings.transformer(4)
    stored = checkpoint.load(folder, registry.CATALOGUE)[0]["codec"].embedding[
        ...
    ]  # as save_dtype says
    assert stored.dtype == jnp.bfloat16
    images = varjax.generate(model, labels=[1, 2], policy="streaming", budget=0.5)
    chex.assert_shape(images, (2, 4, 4, 3))
    assert model.sampling().top_k == 16 and model.sampling().cfg == 2


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly(whole, tmp_path):
    """Dropout of a step follows from its number, too."""
    settings, out, _ = whole
    again = tmp_path / "again"
    shutil.copytree(out / "vqvae", again / "vqvae")
    with dies_at(LlamaGenStage, 14):
        session.train(settings, "var", again, quiet=True)
    assert history(again, "var")[-1]["step"] == 12
    session.train(settings, "var", again, quiet=True)
    assert history(again, "var") == history(out, "var")


@pytest.mark.slow
def test_dropout(whole):
    """Its share of the numbers is 0, the mean stays, and validation has none."""
    x = teacher_forcing.dropped_out(jnp.ones((100, 100)), 0, rate=0.25, key=jax.random.key(0))
    assert abs(float((x == 0).mean()) - 0.25) < 0.02 and abs(float(x.mean()) - 1) < 0.03
    settings, _, folder = whole
    model = varjax.load(folder).transformer
    context = model.encode_condition(jnp.arange(2), guided=False)
    tokens, keys = jnp.ones((2, 15), int), jax.random.split(jax.random.key(1), 2)
    plain = teacher_forcing.of_tokens(model, context, tokens)
    noisy = [
        teacher_forcing.of_tokens(model, context, tokens, dropout=0.1, key=key) for key in keys
    ]
    chex.assert_trees_all_equal(
        plain, teacher_forcing.of_tokens(model, context, tokens, key=keys[0])
    )
    assert not np.allclose(plain, noisy[0]) and not np.allclose(*noisy)


WRONG = {
    "schedule": ({"patch_nums": (1, 2)}, "patch_nums=1,2 is for family=var only: leave it out"),
    "size": ({"image_size": 7, "ch_mult": (1, 1)}, "image_size=7 given, .* choose a multiple of 2"),
    "width": ({"ch": 40}, "ch 40 is not a multiple of the normalisation groups, 32"),
    "shifts": ({"shifts": 25}, "shifts=25 given: choose 0 to 24"),
    "heads": ({"heads": 3}, "dim 32 is not a multiple of n_head 3"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings(changes, message):
    with pytest.raises(UserError, match=message):
        _settings("pictures", **changes)
