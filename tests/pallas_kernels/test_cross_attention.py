"""Attention over a text: the reference against plain NumPy, the kernel against the reference."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cross_attention, implementations, mosaic_products
from pallas_kernels.cross_attention import TextKeys, attend_text, reference
from pallas_kernels.cross_attention.api import MODULES
from pallas_kernels.cross_attention.mosaic_gpu import text_table
from tests.pallas_kernels import gpu_simulation

LAYERS, ROWS, HEADS = 3, 2, 2


def problem(tokens=70, text=100, size=64, dtype=jnp.float32, lengths=(3, 100), **options):
    """Queries, texts, and their keys and values; NaN where no text is."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (ROWS, tokens, HEADS, size), dtype)
    shape = (LAYERS, ROWS, HEADS, text, size)
    k, v = (jax.random.normal(key, shape, dtype) for key in keys[1:])
    return q, TextKeys.of(k, v, jnp.array(lengths), **options), (k, v)


def expected(q, k, v, lengths):
    """Row by row and head by head, float64, without what comes after a text."""
    found = np.zeros(q.shape)
    for row, length in enumerate(lengths):
        for head in range(q.shape[2]):
            keys, values = (np.asarray(a, np.float64)[row, head, :length] for a in (k, v))
            scores = np.asarray(q, np.float64)[row, :, head] @ keys.T / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            found[row, :, head] = weights @ values / weights.sum(-1, keepdims=True)
    return found


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("at_once", [2**28, 1])
def test_the_reference_attends_to_the_text_of_each_row(layer, at_once, monkeypatch):
    monkeypatch.setattr(reference, "SCORE_BYTES", at_once)
    q, text, (k, v) = problem()
    found = attend_text(q, text, layer)
    np.testing.assert_allclose(found, expected(q, k[layer], v[layer], (3, 100)), atol=2e-6)


def test_texts_are_cut_into_blocks_for_kernels_only():
    whole, cut = (problem(implementation=name)[1].kv_pool for name in ("reference", "mosaic"))
    chex.assert_shape(whole, (ROWS, LAYERS * HEADS, 100, 128))
    chex.assert_shape(cut, (ROWS, LAYERS * HEADS * 2, 64, 128))
    again = cut.reshape(ROWS, LAYERS * HEADS, 128, 128)
    np.testing.assert_array_equal(again[:, :, :100], whole)
    assert not again[:, :, 100:].any()


def test_a_layer_has_its_own_blocks():
    _, text, _ = problem(implementation="mosaic")
    table = text_table(text, 1, HEADS)
    np.testing.assert_array_equal(table.ids[0], [[4, 5], [6, 7]])
    np.testing.assert_array_equal(table.stop[:, 0], [[3, 0], [64, 36]])


def test_other_kernels_names_run_the_reference():
    for name in ("triton", "tpu", "tpu-interpret"):
        assert implementations.first_choice(name, MODULES) == "reference"
        q, text, _ = problem(implementation=name)
        np.testing.assert_array_equal(
            attend_text(q, text, 0), attend_text(*problem(implementation="reference")[:2], 0)
        )


@gpu_simulation.needed
@pytest.mark.parametrize("capability", mosaic_products.PRODUCTS)
@pytest.mark.parametrize(
    "shape",
    [
        dict(tokens=70),
        pytest.param(dict(tokens=1, text=20, lengths=(1, 20)), marks=pytest.mark.slow),
        pytest.param(dict(tokens=200, text=128, size=128), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernel_attends_as_the_reference(shape, capability, monkeypatch):
    monkeypatch.setattr(mosaic_products.target, "capability", lambda: capability)
    shape = dict(lengths=(3, shape.get("text", 100)), dtype=jnp.bfloat16) | shape
    plain = attend_text(*problem(**shape)[:2], 1).astype(jnp.float32)
    q, text, _ = problem(**shape, implementation="mosaic-interpret")
    found = jax.jit(cross_attention.attend_text)(q, text, 1).astype(jnp.float32)
    np.testing.assert_allclose(found, plain, atol=1e-2, rtol=1e-2)
