"""Token attention against a loop in float64: heads of every published size, empty slots, windows,
int8 pools, sums of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write.reference import encode
from pallas_kernels.token_attention import HeadSlots, Query, attend, scores

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


@jax.jit
def seen(q, pool, position, bias=None, scale=None, used=None):
    """Output and masses of a query that sees all that slots hold."""
    return attend(Query(q, first_bias=bias), HeadSlots(pool, position, scale, used=used))


@pytest.mark.parametrize("size", [64, 100, 128])
def test_attention(size):
    q, k, v, position = problem(size)
    rng = np.random.default_rng(1)
    newest = np.int32(SLOTS - 4)
    reach = rng.integers(1, SLOTS, (ROWS, HEADS)).astype(np.int32)
    bias = rng.normal(size=ROWS).astype(np.float32)
    mass = rng.random((ROWS, HEADS, SLOTS)).astype(np.float32)
    pool = np.where(position[..., None] >= 0, np.concatenate([k, v], -1), np.nan)

    @jax.jit
    def call(q, pool, position, newest, reach, bias, mass):
        query = Query(q, newest, bias, mass_weight=0.5, protected=3)
        return attend(query, HeadSlots(pool, position, mass=mass, reach=reach))

    out, total = call(q, pool, position, newest, reach, bias, mass)
    for r, n in np.ndindex(ROWS, HEADS):
        place = position[r, n]
        visible = (place >= 0) & (place <= newest)
        visible &= (place < 3) | (place > newest - reach[r, n])
        expected, weights = by_hand(q[r, n], k[r, n], v[r, n], visible, bias[r])
        np.testing.assert_allclose(out[r, n], expected, atol=2e-6)
        np.testing.assert_allclose(total[r, n], mass[r, n] + 0.5 * weights, atol=1e-6)


def test_reach_is_counted_from_somewhere():
    q, k, v, position = problem(64)
    pool, position = jnp.concatenate([k, v], -1), jnp.asarray(position)
    slots = HeadSlots(pool, position, reach=jnp.ones((ROWS, HEADS), jnp.int32))
    with pytest.raises(ValueError, match="newest"):
        attend(Query(jnp.asarray(q)), slots)


@pytest.mark.parametrize(
    ("rows", "slots", "kind"), [(3, 65, "float32"), (2, 64, "bfloat16"), (4, 150, "int8")]
)
def test_slots_in_use(rows, slots, kind):
    """As if nothing were said of them: in several blocks of which the last overlaps, where the
    first one has nothing visible, with NaN behind; and of so few that one block holds them."""
    rng = np.random.default_rng(slots)
    q, k, v = (
        rng.normal(size=(rows, HEADS, *more, 64)).astype(np.float32) / 4
        for more in ((), (slots,), (slots,))
    )
    bias = rng.normal(size=rows).astype(np.float32)
    numbers = kind if kind != "bfloat16" else jnp.bfloat16
    pool, scale = encode(jnp.asarray(k), jnp.asarray(v), jnp.dtype(numbers))
    scale = None if scale is None else jnp.moveaxis(scale, -1, 1)
    q = q.astype(jnp.bfloat16 if kind == "bfloat16" else np.float32)
    for used in {1, slots // 2, slots - 1, slots}:
        filled = (np.arange(slots) < used) & (rng.random((rows, 1, slots)) < 0.7)
        filled |= np.arange(slots) == used - 1
        position = np.where(filled, np.arange(slots), -1).astype(np.int32)
        expected, _ = seen(q, pool, position, bias, scale)
        poisoned = pool
        if kind != "int8":
            poisoned = jnp.where(filled[..., None], pool, jnp.nan)
        out, mass = seen(q, poisoned, position, bias, scale, np.int32(used))
        assert mass is None and out.dtype == q.dtype
        limit = 1e-2 if kind == "bfloat16" else 2e-6
        np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), atol=limit)


def test_int8():
    """Exactly what the rounded keys and values give."""
    size = 100
    q, k, v, position = problem(size)
    pool, scale = encode(jnp.asarray(k), jnp.asarray(v), jnp.int8)
    scale = jnp.moveaxis(scale, -1, 1)
    number = np.asarray(pool, np.float32)
    k, v = (
        number[..., i * size : (i + 1) * size] * np.asarray(scale)[:, i, ..., None] for i in (0, 1)
    )
    out, _ = seen(q, pool, position, scale=scale)
    found = jax.jit(scores)(q[:, :, None], HeadSlots(pool, scale=scale))
    for r, n in np.ndindex(ROWS, HEADS):
        expected, _ = by_hand(q[r, n], k[r, n], v[r, n], position[r, n] >= 0)
        np.testing.assert_allclose(out[r, n], expected, atol=5e-6)
        np.testing.assert_allclose(found[r, n, 0], k[r, n] @ q[r, n], atol=5e-6)
