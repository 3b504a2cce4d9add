"""Training that begins with a checkpoint: what is taken from it, what is refused, and that a
resumed run does not begin again."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import varjax
from experiments.training import data, fine_tuning, session
from experiments.training.var_trainer import LlamaGenStage, TransformerStage, VARStage
from tests.experiments.training import test_llamagen
from tests.experiments.training.conftest import dies_at, history
from tests.often import often
from varjax.core.errors import UserError
from varjax.models import registry, teacher_forcing
from varjax.storage import checkpoint, parameters

NAMES = ("red", "green", "blue", "yellow")
STAGES = {"var": VARStage, "llamagen": LlamaGenStage}
SHORT = {"log_every": 2, "checkpoint_every": 4, "validate_every": 8, "var_steps": 12}
SHORT |= {"vqvae_steps": 12, "var_batch_size": 8, "vqvae_batch_size": 8}


def _random(module: nnx.Module, seed: int) -> nnx.Module:
    """The module with noise on all parameters: none of them is zero, as heads are at first."""
    rng = np.random.default_rng(seed)
    found = {
        name: a + 0.05 * rng.standard_normal(a.shape).astype(np.float32)
        for name, a in parameters.named(module).items()
    }
    return parameters.fill(module, found)


def _checkpoint(folder, settings, names=None):
    """Write a model of these settings with random weights."""
    kinds = registry.family(settings.family).parts
    configs = {"transformer": settings.transformer(4), "codec": settings.codec}
    parts = {
        name: _random(kinds[name].module(config, rngs=nnx.Rngs(0)), 1)
        for name, config in configs.items()
    }
    sampling = {"cfg": 1.25 if settings.label_drop else 1.0}
    metadata = {"sampling": sampling} | ({"class_names": list(names)} if names else {})
    family = registry.family(settings.family)
    checkpoint.save(folder, family, parts, metadata=metadata, dtype="bfloat16")
    return str(folder)


@pytest.fixture(scope="module")
def made(shared_tiny, tmp_path_factory):
    """{family: (checkpoint, path of the pictures)}"""
    folder, pictures = tmp_path_factory.mktemp("checkpoints"), shared_tiny().data
    small = shared_tiny(image_size=4, ch_mult=(1,))  # its codec takes seconds to compile
    own = {"var": small, "llamagen": test_llamagen._settings(pictures)}
    return {f: (_checkpoint(folder / f, own[f]), pictures) for f in own}


def _tuned(made, which, **given):
    init, pictures = made[which]
    return fine_tuning.settings(init, data=pictures, **{**SHORT, **given})


def _own_loss(init: str, pictures: data.Dataset) -> float:
    """Cross entropy of the checkpoint on validation pictures, from its parts and NumPy."""
    found = varjax.load(init, dtype="float32")
    transformer, codec = found.parts["transformer"], found.parts["codec"]
    # as many as fill batches of eight
    images, labels = ((a[: len(a) // 8 * 8 or None]) for a in (pictures.val, pictures.val_labels))
    tokens = codec.images_to_tokens(jnp.asarray(data.to_float(images)))
    if found.metadata["family"] == "var":
        logits = transformer(jnp.asarray(labels), codec.quantizer.teacher_inputs(tokens))
    else:
        context = transformer.encode_condition(jnp.asarray(labels), guided=False)
        logits = teacher_forcing.of_tokens(transformer, context, tokens[:, :-1])
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits - top, np.asarray(tokens)[..., None], -1)[..., 0]
    return float((np.log(np.exp(logits - top).sum(-1)) - chosen).mean())


@pytest.fixture(scope="module", params=often((), STAGES))
def run(request, made, tmp_path_factory):
    """(family, settings, folder, loss before step 0) of a run with a frozen codec."""
    family = request.param
    settings, first = _tuned(made, family, var_lr=3e-3), []
    out, step = tmp_path_factory.mktemp("tuned") / family, TransformerStage.step

    def measured(self, state, n):
        if n == 0:
            first.append(self.validate(state)["loss"])
        return step(self, state, n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerStage, "step", measured)
        session.train(settings, "var", out, quiet=True)
    return family, settings, out, first[0]


def test_it_begins_with_the_loss_of_the_checkpoint(made, run):
    family, settings, _, first = run
    init, pictures = made[family]
    shown = data.load(pictures, settings.image_size)
    np.testing.assert_allclose(first, _own_loss(init, shown), rtol=2e-6)


def test_losses_fall_and_the_model_draws(made, run):
    """The codec is the checkpoint's, and so is the sampling."""
    family, settings, out, first = run
    logged = history(out, "var")
    assert logged[-1]["validation"]["loss"] < first - 0.05
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.05
    model, before = varjax.load(out / "model"), varjax.load(made[family][0])
    assert model.metadata["sampling"] == {"cfg": 1.25}
    assert model.metadata["training"]["init"] == settings.start.digest
    for name, array in parameters.named(before.parts["codec"]).items():
        assert np.array_equal(parameters.named(model.parts["codec"])[name], array), name
    side = settings.image_size
    assert varjax.generate(model, labels=[1, 3], policy="full").shape == (2, side, side, 3)


def test_a_resumed_run_does_not_begin_again(made, run, tmp_path, monkeypatch):
    """It reads no weights of the checkpoint for the transformer; losses are the same, all bits."""
    family, settings, out, _ = run
    with dies_at(TransformerStage, 7):
        session.train(settings, "var", tmp_path / "run", quiet=True)

    def not_again(*given):
        raise AssertionError("the weights are those of the run")

    with monkeypatch.context() as patch:
        patch.setattr(fine_tuning.Start, "transformer_parameters", not_again)
        session.train(settings, "var", tmp_path / "run", quiet=True)
    assert history(tmp_path / "run", "var") == history(out, "var")


@pytest.mark.slow
def test_the_codec_is_trained_from_its_weights(made, tmp_path):
    """Its quantiser runs from the first step on, and no code is placed anew."""
    settings = _tuned(made, "var", vqvae_steps=2, vqvae_lr=1e-9)
    session.train(settings, "vqvae", tmp_path / "run", quiet=True)
    entry = history(tmp_path / "run", "vqvae")[-1]
    assert "quantizer" in entry
    codec = varjax.load(made["var"][0]).parts["codec"]
    pictures = data.load(settings.data, settings.image_size)
    images = jnp.asarray(data.to_float(pictures.val))
    found = codec.tokens_to_images(codec.images_to_tokens(images))
    error = jnp.square(found - images).mean((1, 2, 3)) / 4
    psnr = float((-10 * jnp.log10(error)).mean())
    np.testing.assert_allclose(entry["validation"]["psnr"], psnr, atol=1e-3)


def test_folders_that_do_not_go_on(made, run, tmp_path):
    """With the codec trained now, or with another checkpoint."""
    _, settings, out, _ = run
    with pytest.raises(UserError, match="was begun with the codec of init"):
        session.train(settings, "vqvae", out)
    other = fine_tuning.Start.read(_checkpoint(tmp_path / "other", settings, NAMES))
    changed = dataclasses.replace(settings.start, digest=other.digest)
    with pytest.raises(UserError, match="other settings: init was"):
        session.train(dataclasses.replace(settings, start=changed), "var", out)


def _classes(names, count):
    empty = np.zeros((0,), np.int32)
    return data.Dataset(empty, empty, empty, empty, count, names)


def test_classes(made, tmp_path):
    """By name where both have names, else by number; others are drawn near those that are there."""
    start = fine_tuning.Start.read(_checkpoint(tmp_path / "named", _tuned(made, "var"), NAMES))
    assert start.classes(_classes(("blue", "pink", "red"), 3)) == (
        [2, -1, 0],
        f"2 of 3 classes are classes of {start.path} (by name), embeddings of 1 are drawn anew",
    )
    assert start.classes(_classes((), 4))[0] == [0, 1, 2, 3]
    assert start.classes(_classes((), 5))[0] == [-1] * 5
    assert fine_tuning.Start.read(made["var"][0]).classes(_classes(NAMES, 4))[0] == [0, 1, 2, 3]
    names = parameters.named(varjax.load(start.path).parts["transformer"])
    table, again = (
        np.asarray(start.transformer_parameters([2, -1, 0], 3)["class_embedding"]) for _ in range(2)
    )
    own = np.asarray(names["class_embedding"])
    assert np.array_equal(table[[0, 2, 3]], own[[2, 0, 4]]) and np.array_equal(table, again)
    assert not np.isclose(table[1], own).any() and abs(table[1].std() / own.std() - 1) < 0.5


WRONG = {
    "size": ({"depth": 3}, r"depth=3 given, but init=.* has depth=2, which .*: leave it out"),
    "sides": ({"patch_nums": (1, 4)}, "patch_nums=1,4 given, but init=.* has patch_nums=1,2,4"),
    "family": ({"family": "llamagen"}, "family=llamagen given, but .* of the family var"),
    "first steps": ({"autoencoder_steps": 4}, "autoencoder_steps=4 given, but the codec of init"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_what_contradicts_the_checkpoint(made, given, message):
    with pytest.raises(UserError, match=message):
        _tuned(made, "var", **given)
    assert _tuned(made, "var", depth=2, family="var").depth == 2  # what agrees may be said


def test_what_cannot_be_trained(made, tmp_path, models_that_cannot):
    for init, message in models_that_cannot:
        with pytest.raises(UserError, match=message):
            fine_tuning.settings(init, data="x")
    with pytest.raises(UserError, match="leave init out"):
        session.train(_tuned(made, "var"), "classifier", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def models_that_cannot(tmp_path):
    """[(checkpoint, message)]; the published names have no weights here."""
    return [
        ("infinity-2b", "is of the family infinity: var and llamagen can be trained, which draw"),
        ("var-d16", "has no weights here"),
        ("llamagen-t2i-xl-256", "draws from text: training takes labels"),
        (str(tmp_path / "none"), "none"),
    ]
