"""What queries, keys and values become, against a float64 oracle that turns pair by pair; tables of
all layers against slices by hand."""

import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.projection import Projection, quarter_turn, quarter_turn_by_product
from pallas_kernels.tables import (
    CONSECUTIVE,
    EMPTY,
    KIND_BITS,
    PARTIAL,
    BlockTable,
    BlockWrites,
    block_writes,
)

ROWS, TOKENS, HEADS, SIZE = 2, 5, 3, 8
SCALE = 0.3
# multiplier and scale exclude each other: with the former the latter is not looked at
CHOICES = itertools.product((False, True), (False, True), (None, "multiplier", "scale"))
COMBINATIONS = {
    "-".join(filter(None, ("bias" * bias, "rotation" * rotation, norm))) or "plain": (
        bias,
        rotation,
        norm,
    )
    for bias, rotation, norm in CHOICES
}


def projection(bias: bool, rotation: bool, norm: str | None, dtype=jnp.float32) -> Projection:
    rng = np.random.default_rng(3)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    qkv, biases, angles = normal(ROWS, TOKENS, 3, HEADS, SIZE), {}, None
    if bias:
        biases = {name: normal(HEADS, SIZE) for name in ("q_bias", "v_bias")}
    if rotation:
        pairs = np.repeat(rng.uniform(0, 2 * math.pi, (TOKENS, SIZE // 2)), 2, axis=-1)
        angles = tuple(jnp.asarray(f(pairs), jnp.float32) for f in (np.cos, np.sin))
    multiplier = jnp.asarray(rng.uniform(1, 4, HEADS), jnp.float32)
    return Projection(
        qkv,
        **biases,
        rotation=angles,
        multiplier=multiplier if norm == "multiplier" else None,
        scale=SCALE if norm == "scale" else 1.0,
    )


def oracle(given: Projection) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values [R, N, T, H], one token of one head after the other, in float64."""
    qkv, *rest = jax.tree.map(
        lambda a: np.asarray(a, np.float64),
        (given.qkv, given.q_bias, given.v_bias, given.rotation, given.multiplier),
    )
    q_bias, v_bias, rotation, multiplier = rest
    found = np.zeros((3, ROWS, HEADS, TOKENS, SIZE))
    for r, n, t in np.ndindex(ROWS, HEADS, TOKENS):
        q, k, v = (qkv[r, t, part, n].copy() for part in range(3))
        if q_bias is not None:
            q, v = q + q_bias[n], v + v_bias[n]
        if rotation is not None:
            cos, sin = (table[t] for table in rotation)
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        if multiplier is not None:
            q, k = multiplier[n] * q / math.sqrt(sum(q**2)), k / math.sqrt(sum(k**2))
        else:
            q = q * given.scale
        found[:, r, n, t] = q, k, v
    return tuple(found)


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Pairs (x[2 j], x[2 j + 1]) as points of a plane, turned around its origin."""
    result = np.zeros(SIZE)
    for j in range(0, SIZE, 2):
        point = complex(x[j], x[j + 1]) * complex(cos[j], sin[j])
        result[j], result[j + 1] = point.real, point.imag
    return result


@pytest.mark.parametrize("combination", COMBINATIONS.values(), ids=COMBINATIONS.keys())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_finished(combination, dtype):
    given = projection(*combination, dtype=dtype)
    found = given.queries(), given.keys(), given.values()
    # bfloat16: the queries are rounded once, the sum of a value and its bias as well
    near = {"float32": {"rtol": 1e-5, "atol": 1e-6}, "bfloat16": {"rtol": 2**-7, "atol": 1e-3}}
    for mine, expected in zip(found, oracle(given), strict=True):
        assert mine.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(np.asarray(mine, np.float64), expected, **near[dtype])


def test_a_key_of_zeros_stays_finite():
    given = projection(False, True, "multiplier")
    given = jax.tree.map(jnp.zeros_like, given)
    chex.assert_trees_all_equal(given.keys(), jnp.zeros((ROWS, HEADS, TOKENS, SIZE)))
    chex.assert_tree_all_finite(given.queries())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quarter_turns_agree(dtype):
    """The one for TPUs is a product with zeros and ones: exact."""
    x = jax.random.normal(jax.random.key(0), (3, SIZE)).astype(dtype)
    expected = np.stack([-x[:, 1::2], x[:, 0::2]], axis=-1).reshape(3, SIZE)
    chex.assert_trees_all_equal(np.asarray(quarter_turn(x)), expected)
    chex.assert_trees_all_equal(np.asarray(quarter_turn_by_product(x)), expected)


# --- tables of all layers ---

LAYERS, ENTRIES, BLOCK = 3, 4, 2


def layers_of_tables(kind) -> tuple[tuple[np.ndarray, ...], object]:
    """(arrays of all layers, the table that holds them)."""
    rng = np.random.default_rng(2)
    shape = (LAYERS, HEADS, ENTRIES)
    arrays = tuple(rng.integers(0, 9, shape).astype(np.int32) for _ in range(3))
    if kind is BlockWrites:
        arrays = arrays[0], rng.integers(-1, 9, (*shape, BLOCK)).astype(np.int32)
    return arrays, kind(*arrays)


@pytest.mark.parametrize("kind", [BlockTable, BlockWrites])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_layer_is_a_slice(kind, layer):
    """Tables may hold NumPy's arrays, which a traced number cannot index."""
    arrays, table = layers_of_tables(kind)
    found = jax.jit(lambda number: table.of_layer(number).sliced())(layer)
    chex.assert_trees_all_equal(found, kind(*(a[layer] for a in arrays)))
    assert found.layer is None and found.sliced() is found
    assert table.of_layer(jnp.int32(layer)).ids is table.ids  # nothing is copied


def test_slots_by_token_say_what_writes_say():
    """Runs of 8 tokens, token by token; a last tile that is not full."""
    slots = np.full((2, 70), -1)
    slots[0, :70] = np.arange(100, 170)
    slots[1, 3:40] = np.arange(37)[::-1]
    found = block_writes(slots, 4).by_token
    words, each = found[:, :16], found[:, 16:]
    assert found.dtype == np.int32 and each.shape == (2, 128)
    np.testing.assert_array_equal(each[:, :70], slots)
    assert (each[:, 70:] == -1).all()
    kinds = words & (1 << KIND_BITS) - 1
    assert kinds[0].tolist() == [CONSECUTIVE] * 8 + [PARTIAL] + [EMPTY] * 7
    assert (words[0, :8] >> KIND_BITS).tolist() == list(range(100, 164, 8))
    assert kinds[1].tolist() == [PARTIAL] * 5 + [EMPTY] * 11
