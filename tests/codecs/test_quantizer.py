"""Invariants of the residual quantiser that do not need reference arrays."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from varjax.codecs.vqvae import Quantizer, VQVAEConfig
from varjax.core.sequence import Schedule

SMALL = VQVAEConfig(
    vocab_size=24, z_channels=4, ch=32, ch_mult=(1, 1), schedule=Schedule.square((1, 2, 3, 4))
)
# schedule, share_quant_resi, quant_resi
VARIANTS = {
    "shared by ticks": ("1x1;2x2;3x3;4x4", 4, 0.5),
    "one phi": ("1x1;2x2;4x4", 1, 0.5),
    "own phi, negative ratio": ("1x1;2x2;4x4", 0, -0.5),
    "no phi": ("1x1;2x2;4x4", 4, 0.0),
    "not square": ("1x2;2x3;3x5", 2, 0.5),
    "single scale": ("3x2", 4, 0.5),
}


def _quantizer(**changes) -> Quantizer:
    """A quantiser whose phi convolutions are not the identity."""
    quantizer = Quantizer(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))
    if quantizer.phi_kernel is not None:
        noise = _numbers(1, *quantizer.phi_kernel[...].shape)
        quantizer.phi_kernel.set_value(quantizer.phi_kernel[...] + 0.1 * noise)
        quantizer.phi_bias.set_value(quantizer.phi_bias[...] + 0.05)
    return quantizer


def _features(config, batch=2):
    return _numbers(2, batch, *config.schedule.final_map, config.z_channels)


def _numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("text", "share", "quant_resi"), VARIANTS.values(), ids=VARIANTS)
def test_shapes_and_agreement(text, share, quant_resi):
    """Tokens, running sums, teacher inputs and the training forward are one quantisation."""
    quantizer = _quantizer(
        schedule=Schedule.parse(text), share_quant_resi=share, quant_resi=quant_resi
    )
    config, schedule = quantizer.config, quantizer.config.schedule
    f = _features(config)

    @jax.jit
    def run(quantizer, f):
        tokens = jnp.concatenate([found for found, _, _ in quantizer.steps(f)], axis=1)
        again = quantizer.code_maps(tokens), quantizer.teacher_inputs(tokens)
        return tokens, *again, quantizer.quantize(f)

    tokens, maps, inputs, (straight, trained_tokens, loss) = run(quantizer, f)
    chex.assert_shape(tokens, (2, schedule.total_tokens))
    chex.assert_type(tokens, jnp.int32)
    chex.assert_shape(maps, (schedule.num_scales, *f.shape))
    chex.assert_shape(inputs, (2, schedule.total_tokens - schedule.tokens[0], 4))
    chex.assert_trees_all_equal(trained_tokens, tokens)
    chex.assert_trees_all_close(straight, maps[-1], atol=1e-5)
    expected = 1.25 * jnp.square(maps - f).mean()
    chex.assert_trees_all_close(loss, expected, rtol=1e-5)


def test_gradients():
    """The map passes gradients straight through; codes and phi learn from the loss only."""
    quantizer = _quantizer()
    f = _features(quantizer.config)
    graph, state = nnx.split(quantizer)

    @jax.jit
    def run(state, f):
        quantizer = nnx.merge(graph, state)
        through = jax.grad(lambda f: (quantizer.quantize(f)[0] * f).sum())(f)
        learned = jax.grad(lambda s: nnx.merge(graph, s).quantize(f)[2])(state)
        return through, f + quantizer.quantize(f)[0], learned

    through, expected, gradients = run(state, f)
    chex.assert_trees_all_close(through, expected, atol=1e-5)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))
