"""Matrices in 8 bits: how far they are off, that products read them as they are, that every family
draws with them what it would draw with the matrices that they stand for. Products with activations
in 8 bits: tests/fast/test_schemes.py."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from tests.models_under_test import FAMILIES, arrays_of, fixture_model, greedy_generator
from tests.often import often
from varjax.core.errors import UserError
from varjax.fast import quantized
from varjax.fast.quantized import Quantized, quantize
from varjax.fast.stored import Stored
from varjax.generation import memory
from varjax.models.loading import computed_in
from varjax.models.model import Model
from varjax.storage import checkpoint, parameters


def random(*shape: int, dtype="float32") -> np.ndarray:
    """Matrices whose channels differ in size by orders of magnitude."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 2, shape[-1]), dtype)


def held(matrix: Quantized) -> np.ndarray:
    """What the numbers stand for, float32 [..., D_in, D_out]."""
    numbers = np.asarray(matrix.array).astype(np.float32)
    numbers = numbers.swapaxes(-1, -2) if matrix.scheme.activations else numbers
    return numbers * np.asarray(matrix.scale)[..., None, :]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(5, 7), (3, 64, 48)])
def test_numbers_are_off_by_half_a_step(shape, dtype):
    matrix = random(*shape, dtype=dtype).at[..., 2].set(0)
    found = quantize(matrix)
    assert found.shape == shape and found.dtype == dtype and found.scale.dtype == np.float32
    off = np.abs(held(found) - np.asarray(matrix, np.float32))
    assert (off <= found.scale[..., None, :] * (0.5 + 1e-5)).all()
    assert not off[..., 2].any()  # a channel of zeros
    assert np.abs(found.array).max(-2).min() in (0, 127)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [1, 2**20])
def test_products(dtype, most, monkeypatch):
    """At once, and a few rows at a time as on a CPU, also where these do not divide the matrix."""
    monkeypatch.setattr(quantized, "CPU_BYTES", most)
    matrix, x = quantize(random(35, 24), dtype=dtype), random(2, 3, 35, dtype=dtype)
    expected = np.asarray(x, np.float32) @ held(matrix)
    close = {"rtol": 1e-2 if dtype == "bfloat16" else 1e-5, "atol": 1e-3}
    found = matrix.product(x)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(np.float32), expected, **close)
    wide = matrix.product(x, jnp.float32)  # of rounded inputs, but exact sums
    np.testing.assert_allclose(wide, expected, rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(quantized.target, "platform", lambda: "tpu")  # at once
    np.testing.assert_allclose(matrix.product(x, jnp.float32), wide, rtol=1e-4, atol=1e-3)


def test_no_matrix_is_held_in_a_floating_type():
    """A loop over tokens takes no temporaries of the size of a weight: nothing is converted ahead
    of it either."""
    layers = [(quantize(random(512, 2048)), quantize(random(2048, 512))) for _ in range(2)]
    layers = jax.tree.map(jnp.asarray, layers)

    def token(layers, x):
        for wide, narrow in layers:
            x = x + narrow.product(jnp.tanh(wide.product(x)))
        return x

    def program(layers, x):
        return jax.lax.scan(lambda x, _: (token(layers, x), None), x, length=4)[0]

    compiled = jax.jit(program).lower(layers, jnp.ones((2, 512))).compile()
    # rows that are converted, and a few activations; a matrix would take 4 MiB
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * quantized.CPU_BYTES


def restored(model: Model) -> Model:
    """The model with the float32 matrices that its 8-bit ones stand for."""

    def wide(leaf):
        return jnp.asarray(held(leaf)) if quantized.is_one(leaf) else leaf

    found = jax.tree.map(wide, model.transformer, is_leaf=quantized.is_one)
    return dataclasses.replace(model, parts={**model.parts, "transformer": found})


OFTEN = [("c_k5_nol2norm", "scan")]
DRAWING = [
    *OFTEN,
    ("llamagen_c2i", "auto"),
    (FAMILIES["infinity"], "scan"),
    (FAMILIES["var"], "unroll"),
]
DRAWING += [(name, "auto") for name in ("llamagen_t2i", "janus_small", "lumina_groups")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), often(OFTEN, DRAWING))
def test_every_family_draws_with_them(name, layers):
    """The same as with the float32 matrices that they stand for."""
    model, index = fixture_model(name), np.arange(2)
    eight, segments = model.quantized(), "auto" if model.draws_tokens else 1
    assert model.weights_dtype == "float32" and eight.weights_dtype == "int8"
    (found, _), (expected, _) = (
        greedy_generator(m, layers=layers, segments=segments).run_batch(arrays_of(m, index), index)
        for m in (eight, restored(eight))
    )
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=2e-3)


@pytest.mark.slow
def test_loaded_as_they_are_converted():
    """From the stored numbers, at once or when their places are known."""
    expected = parameters.named(varjax.load(dtype="float32").quantized().transformer)
    for on_disk, kind in ((True, Stored), (False, jax.Array)):
        model = varjax.load(dtype="float32", weights_dtype="int8", on_disk=on_disk)
        found = parameters.named(model.transformer)
        assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(found))
        chex.assert_trees_all_equal(jax.tree.map(np.asarray, found), expected)
    assert "float32, matrices in int8" in repr(model)
    half = varjax.load(dtype="bfloat16", weights_dtype="int8")
    assert half.dtype == jnp.bfloat16 and half.weights_dtype == "int8"
    # scales and numbers are those of the stored matrices, whatever products run in
    kernel = found["blocks/fc1/kernel"]
    chex.assert_trees_all_equal(
        parameters.named(half.transformer)["blocks/fc1/kernel"].array, kernel.array
    )


@pytest.mark.parametrize("name", ["demo", "demo-llamagen"])
@pytest.mark.parametrize("dtype", often(["bfloat16"], ["float32", "bfloat16"]))
def test_predicted_bytes(name, dtype):
    abstract, model = varjax.describe(name).quantized(), varjax.load(name, dtype)
    assert abstract.is_abstract and "only shapes of float32, matrices in int8" in repr(abstract)
    held = jax.tree.leaves(model.quantized().networks)
    plan = varjax.plan(abstract, "full")
    predicted = memory.predict(abstract, plan, 2, dtype, dtype).weights
    assert predicted == sum(leaf.nbytes for leaf in held)
    assert predicted < memory.predict(model, plan, 2, dtype, dtype).weights


def test_what_is_refused(tmp_path):
    model = varjax.load()
    with pytest.raises(UserError, match="kernel is in 8 bits.*write the model"):
        eight = model.quantized()
        checkpoint.save(tmp_path / "out", model.family, eight.parts)
    with pytest.raises(UserError, match="contradict each other"):
        varjax.load(dtype="float32", weights_dtype="bfloat16")
    with pytest.raises(UserError, match="weights_dtype.*float32, bfloat16, int8, w8a8, fp8"):
        varjax.load(weights_dtype="int4")
    assert computed_in(None, "bfloat16") == "bfloat16" and computed_in(None, "int8") is None
