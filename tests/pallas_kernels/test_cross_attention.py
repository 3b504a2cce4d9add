"""Attention over a text: the reference against plain NumPy, the kernel against the reference."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import chips, cross_attention, implementations
from pallas_kernels.cross_attention import TextKeys, attend_text, reference
from pallas_kernels.cross_attention.api import MODULES
from pallas_kernels.cross_attention.mosaic_gpu import text_table
from pallas_kernels.shared import mosaic_products
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_rows_in_turns_are_the_same_rows(at_once, dtype, monkeypatch):
    """Bit for bit, where the last turn has fewer rows, too."""
    rows, tokens, text, size = 5, 7, 20, 16
    keys = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(keys[0], (rows, tokens, HEADS, size), dtype)
    k, v = (jax.random.normal(key, (LAYERS, rows, HEADS, text, size), dtype) for key in keys[1:])
    texts = TextKeys.of(k, v, jnp.arange(rows) + 1)
    whole = jax.jit(attend_text)(q, texts, 1)
    monkeypatch.setattr(reference, "SCORE_BYTES", at_once * 8 * HEADS * tokens * text)
    in_turns = jax.jit(lambda *given: attend_text(*given))(q, texts, 1)  # traced again
    chex.assert_trees_all_equal(in_turns, whole)
    assert in_turns.dtype == whole.dtype


@pytest.mark.aot
@pytest.mark.parametrize("target", ["rtx4090", "a100"])
def test_layers_share_their_memory(target, monkeypatch):
    """Of several layers one after the other: XLA used to make results for all of them at once."""
    if why := chips.why_unavailable(target):
        pytest.skip(why)
    where = SingleDeviceSharding(chips.compile_only_devices(target)[0])
    rows, tokens, text, size, layers = 16, 4096, 64, 64, 24
    monkeypatch.setattr(reference, "SCORE_BYTES", 4 * 8 * HEADS * tokens * text)  # four rows

    def run(x, matrices, pool, length):
        texts = TextKeys(pool, length, layers, "reference")
        for layer, matrix in enumerate(matrices):
            q = (x @ matrix).reshape(rows, tokens, HEADS, size)
            x += attend_text(q, texts, layer).reshape(x.shape)
        return x

    def shape(*numbers, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(numbers, dtype, sharding=where)

    width = HEADS * size
    pool = shape(rows, layers * HEADS, text, 2 * size)
    given = shape(rows, tokens, width), [shape(width, width)] * layers, pool
    lowered = jax.jit(run).lower(*given, shape(rows, dtype=jnp.int32))
    compiled = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    results = 2 * rows * tokens * width  # bytes of a layer's
    assert compiled.memory_analysis().temp_size_in_bytes < layers * results / 2


def test_texts_are_cut_into_blocks_for_kernels_only():
    whole, cut = (problem(implementation=name)[1].kv_pool for name in ("reference", "mosaic"))
    chex.assert_shape(whole, (ROWS, LAYERS * HEADS, 100, 128))
    chex.assert_shape(cut, (ROWS, LAYERS * HEADS * 2, 64, 128))
    again = cut.reshape(ROWS, LAYERS * HEADS, 128, 128)
    np.testing.assert_array_equal(again[:, :, :100], whole)
    assert not again[:, :, 100:].any()


def test_the_reference_reads_texts_in_blocks():
    q, text, (k, v) = problem(implementation="mosaic")
    found = reference.attend_text(q, text, 1)
    np.testing.assert_allclose(found, expected(q, k[1], v[1], (3, 100)), atol=2e-6)


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
