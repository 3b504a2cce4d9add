"""Token attention against a loop in float64: heads of every published size, empty slots, windows,
int8 pools, sums of weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write.reference import encode
from pallas_kernels.token_attention import attend, reference, scores

ROWS, HEADS, SLOTS = 3, 2, 21


def problem(size: int, seed: int = 0):
    """q, k, v, and positions of which some are -1, others in no order."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(ROWS, HEADS, size)).astype(np.float32) / size**0.5
    k, v = (rng.normal(size=(ROWS, HEADS, SLOTS, size)).astype(np.float32) for _ in range(2))
    position = np.stack([rng.permutation(SLOTS) for _ in range(ROWS * HEADS)])
    position = np.where(rng.random(position.shape) < 0.3, -1, position)
    position[:, 0] = 0
    return q, k, v, position.reshape(ROWS, HEADS, SLOTS).astype(np.int32)


def by_hand(q, k, v, visible, bias=0.0):
    """Output and weights of one head."""
    found = np.where(visible, k.astype(np.float64) @ q.astype(np.float64), -np.inf)
    found[0] += bias
    weights = np.exp(found - found.max())
    weights /= weights.sum()
    return np.where(visible[:, None], v, 0).T @ weights, weights


@pytest.mark.parametrize("size", [64, 100, 128])
@pytest.mark.parametrize("poisoned", [False, True])
def test_attention(size, poisoned):
    q, k, v, position = problem(size)
    rng = np.random.default_rng(1)
    newest = np.int32(SLOTS - 4)
    reach = rng.integers(1, SLOTS, (ROWS, HEADS)).astype(np.int32)
    bias = rng.normal(size=ROWS).astype(np.float32)
    mass = rng.random((ROWS, HEADS, SLOTS)).astype(np.float32)
    pool = np.concatenate([k, v], -1)
    if poisoned:
        pool = np.where(position[..., None] >= 0, pool, np.nan)
    arguments = {"newest": newest, "reach": reach, "first_bias": bias, "mass": mass}
    call = jax.jit(functools.partial(attend, protected=3, mass_weight=0.5))
    out, total = call(q, pool, position, **arguments)
    for r, n in np.ndindex(ROWS, HEADS):
        place = position[r, n]
        visible = (place >= 0) & (place <= newest)
        visible &= (place < 3) | (place > newest - reach[r, n])
        expected, weights = by_hand(q[r, n], k[r, n], v[r, n], visible, bias[r])
        np.testing.assert_allclose(out[r, n], expected, atol=2e-6)
        np.testing.assert_allclose(total[r, n], mass[r, n] + 0.5 * weights, atol=1e-6)


def test_reach_is_counted_from_somewhere():
    q, k, v, position = problem(64)
    arrays = map(jnp.asarray, (q, np.concatenate([k, v], -1), position))
    with pytest.raises(ValueError, match="newest"):
        attend(*arrays, reach=jnp.ones((ROWS, HEADS), jnp.int32))


@pytest.mark.parametrize("heads_share", [False, True])
def test_positions_that_heads_or_rows_share(heads_share):
    q, k, v, position = problem(64)
    shared = position[:, :1] if heads_share else position[:1, :1]
    whole = np.broadcast_to(shared, position.shape)
    pool, call = np.concatenate([k, v], -1), jax.jit(attend)
    out, mass = call(q, pool, shared)
    expected, _ = call(q, pool, whole)
    np.testing.assert_array_equal(out, expected)
    assert mass is None


def test_blocks_behind_the_last_one_in_use_are_not_read():
    """Three blocks of 50: the last one is as wrong as can be, but empty, as promised."""
    q, k, v = problem(64)[:3]
    k, v = (np.concatenate([a] * 8, axis=2)[:, :, :150] for a in (k, v))
    position = np.broadcast_to(np.arange(150, dtype=np.int32), (ROWS, HEADS, 150))
    pool = np.concatenate([k, v], -1)
    pool[:, :, 100:] = np.nan
    out, _ = jax.jit(attend)(q, pool, position, used=np.int32(100))
    expected, _ = jax.jit(attend)(q, pool[:, :, :100], position[:, :, :100])
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(("rows", "slots"), [(3, 65), (2, 64), (4, 150)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_slots_in_use(rows, slots, kind):
    """As if nothing were said of them: in several blocks of which the last overlaps, where the
    first one has nothing visible, with NaN behind; and of so few that one block holds them."""
    rng = np.random.default_rng(slots)
    q, k, v = (
        rng.normal(size=(rows, HEADS, *more, 64)).astype(np.float32) / 4
        for more in ((), (slots,), (slots,))
    )
    call, bias = jax.jit(attend), rng.normal(size=rows).astype(np.float32)
    numbers = kind if kind != "bfloat16" else jnp.bfloat16
    pool, scale = encode(jnp.asarray(k), jnp.asarray(v), jnp.dtype(numbers))
    more = {} if scale is None else {"pool_scale": jnp.moveaxis(scale, -1, 1)}
    q = q.astype(jnp.bfloat16 if kind == "bfloat16" else np.float32)
    for used in {1, slots // 2, slots - 1, slots}:
        seen = (np.arange(slots) < used) & (rng.random((rows, 1, slots)) < 0.7)
        seen |= np.arange(slots) == used - 1
        position = np.where(seen, np.arange(slots), -1).astype(np.int32)
        expected, _ = call(q, pool, position, first_bias=bias, **more)
        poisoned = pool
        if kind != "int8":
            poisoned = jnp.where(seen[..., None], pool, jnp.nan)
        out, mass = call(q, poisoned, position, used=np.int32(used), first_bias=bias, **more)
        assert mass is None and out.dtype == q.dtype
        limit = 1e-2 if kind == "bfloat16" else 2e-6
        np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), atol=limit)


def test_platforms_agree():
    """What CPUs do with the whole pool and what others do with its halves."""
    q, k, v, position = problem(64)
    pool, visible = np.concatenate([k, v], -1), position >= 0
    ours, others = (
        jax.jit(f)(q, pool) for f in (reference._products_of_the_whole, reference._products)
    )
    np.testing.assert_allclose(ours, others, atol=1e-5)
    weights = jnp.where(visible, ours, 0)
    np.testing.assert_allclose(
        jax.jit(reference._sums_of_the_whole)(weights, pool, visible),
        jax.jit(reference._sums)(weights, pool, visible),
        atol=1e-5,
    )


@pytest.mark.parametrize("size", [100])
def test_int8(size):
    """Exactly what the rounded keys and values give."""
    q, k, v, position = problem(size)
    pool, scale = encode(jnp.asarray(k), jnp.asarray(v), jnp.int8)
    scale = jnp.moveaxis(scale, -1, 1)
    number = np.asarray(pool, np.float32)
    k, v = (
        number[..., i * size : (i + 1) * size] * np.asarray(scale)[:, i, ..., None] for i in (0, 1)
    )
    out, _ = jax.jit(attend)(q, pool, position, pool_scale=scale)
    found = jax.jit(scores)(q[:, :, None], pool, pool_scale=scale)
    for r, n in np.ndindex(ROWS, HEADS):
        expected, _ = by_hand(q[r, n], k[r, n], v[r, n], position[r, n] >= 0)
        np.testing.assert_allclose(out[r, n], expected, atol=5e-6)
        np.testing.assert_allclose(found[r, n, 0], k[r, n] @ q[r, n], atol=5e-6)
