"""Accumulated gradients and layers that are computed twice: the losses of a plain step, in less
memory of the compiled program. Rung 3: a CPU's program."""

import jax
import numpy as np
import pytest

from experiments.training.data import Dataset
from experiments.training.var_trainer import VARStage
from experiments.training.vqvae_trainer import VQVAEStage

STEPS = 4


def _stage(tiny, **changes) -> VARStage:
    settings = tiny(var_batch_size=32, depth=4, **changes)
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 32, (2, 64, 21)), rng.integers(0, 4, 64).astype(np.int32)
    pictures = Dataset(tokens.astype(np.int32), labels, tokens[0, :8], labels[:8], 4)
    codec = VQVAEStage(settings, settings.codec, pictures)
    quantizer = codec.model(codec.first_state()["params"]).quantizer
    return VARStage(settings, settings.transformer(4), pictures, quantizer)


def _losses(stage: VARStage) -> list[float]:
    state, losses = stage.first_state(), []
    for n in range(STEPS):
        state, metrics = stage.step(state, n)
        losses.append(float(metrics["loss"]))
    return losses


def _temporary_bytes(stage: VARStage) -> int:
    state = stage.first_state()
    batch = (stage.data.train[0, :32], stage.data.train_labels[:32])
    lowered = VARStage._train.lower(stage, state, stage.quantizer, *batch, jax.random.key(0))
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_same_losses_in_less_memory(tiny):
    plain = _stage(tiny)
    losses, size = _losses(plain), _temporary_bytes(plain)
    for changes, within in (({"accumulate": 4}, 1e-5), ({"remat": True}, 1e-6)):
        stage = _stage(tiny, **changes)
        np.testing.assert_allclose(_losses(stage), losses, atol=within, rtol=within)
        assert _temporary_bytes(stage) < 0.8 * size, changes
