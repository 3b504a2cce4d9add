"""Stores go where they should, with the fewest moves, in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from varjax.cache.write import after, destinations, store


@pytest.mark.parametrize("seed", range(6))
def test_destinations_fill_a_prefix_with_the_fewest_moves(seed):
    rng = np.random.default_rng(seed)
    rows, heads, stored, new, room = 2, 3, 6, 5, int(rng.integers(4, 12))
    keep = rng.random((rows, heads, stored + new)) < 0.5
    keep &= np.cumsum(keep, -1) <= room
    stays = rng.random((rows, heads)) < 0.7
    slots = rng.permutation(100)[: rows * heads * room].reshape(rows, heads, room)
    found, in_place = destinations(
        jnp.asarray(keep), stored, jnp.asarray(stays), jnp.asarray(slots), 1000
    )
    found, in_place = np.asarray(found), np.asarray(in_place)
    for r, n in np.ndindex(rows, heads):
        count = keep[r, n].sum()
        columns = [c for c in range(stored + new) if keep[r, n, c]]
        where = {c: slots[r, n, c] if in_place[r, n, c] else found[r, n, c] for c in columns}
        assert sorted(where.values()) == sorted(slots[r, n, :count])  # a prefix, every slot once
        still = {c for c in columns if stays[r, n] and c < min(stored, count)}
        assert {c for c in columns if in_place[r, n, c]} == still
        assert (found[r, n][~keep[r, n] | in_place[r, n]] == 1000).all()


def test_store_writes_only_listed_slots():
    pool = jnp.zeros((2, 3, 4, 6))
    kv = jnp.arange(2 * 3 * 6, dtype=jnp.float32).reshape(2, 3, 6) + 1
    result = np.asarray(store(pool, jnp.array([[5, 12, 0], [11, 2, 99]]), kv)).reshape(2, 12, 6)
    np.testing.assert_array_equal(result[0, [5, 0]], kv[0, [0, 2]])
    np.testing.assert_array_equal(result[1, [11, 2]], kv[1, :2])
    assert (result != 0).any(-1).sum() == 4


def test_after_keeps_values():
    slots = jnp.arange(6).reshape(2, 3)
    for value in (0.0, jnp.nan, -jnp.inf, jnp.inf):
        np.testing.assert_array_equal(after(slots, jnp.full((4,), value)), slots)


def test_pool_is_updated_in_place():
    """A scanned read-then-write of a donated pool: no copy of its shape, temporaries below one
    pool."""
    rows, blocks, size, width, layers = 2, 512, 16, 64, 4

    def layer(pool, slots):
        flat = pool.reshape(rows, -1, width)
        old = flat[jnp.arange(rows)[:, None], slots[None]]
        read = jnp.tanh(old @ jnp.ones((width, width)))
        return store(pool, after(slots[None], read), read), read.sum()

    slots = jnp.arange(layers * 32).reshape(layers, 32)
    pool = jnp.zeros((rows, blocks, size, width))
    program = (
        jax.jit(lambda p: jax.lax.scan(layer, p, slots), donate_argnums=0).lower(pool).compile()
    )
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes
    shapes = rf"f32\[{rows},({blocks},{size}|{blocks * size}),{width}\]"
    assert not re.search(rf"= {shapes}\S* copy\(", program.as_text())
