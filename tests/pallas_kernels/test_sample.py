"""The kernels that choose tokens, step by step with JAX operations, against the reference: the same
tokens, whatever lies behind the end of a row."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sample import sample

KERNELS = ["triton-interpret", "tpu-interpret"]
# (images, tokens, vocabulary): several programs, parts of programs, one token
SHAPES = [(2, 5, 1000), (1, 40, 4096), (3, 1, 512)]
MANY = [(2, 9, 16384), (1, 3, 65536), (1, 2, 50000), (5, 3, 2), (2, 70, 130), (1, 600, 512)]
SHAPES += [pytest.param(shape, marks=pytest.mark.slow) for shape in MANY]
FILTERS = [(900, 0.96), (0, 0.9), (7, 0.0), (0, 0.0), (1, 0.5), (10**6, 1e-6)]


def numbers(shape, seed: int = 0, guided: bool = True):
    """Logits, noise and what else `sample` takes."""
    images, tokens, vocabulary = shape
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, ((1 + guided) * images, tokens, vocabulary))
    noise = random.gumbel(size=shape)
    found = {"tau": jnp.float32(0.7), "strength": jnp.float32(1.3) if guided else None}
    return jnp.float32(logits), jnp.float32(noise), found


def assert_same(kernel: str, logits, noise, **options):
    found, expected = (
        sample(logits, noise, **options, implementation=name) for name in (kernel, "reference")
    )
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_reference(kernel, shape):
    logits, noise, options = numbers(shape)
    assert_same(kernel, logits, noise, **options, top_k=900, top_p=0.96)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("top_k,top_p", FILTERS)
def test_filters(kernel, top_k, top_p):
    logits, noise, options = numbers((2, 5, 520), guided=False)
    assert_same(kernel, logits, noise, **options, top_k=top_k, top_p=top_p)
    assert_same(kernel, logits, 10 * noise, top_k=top_k, top_p=top_p)
