"""Stores go where they should, with the fewest moves, in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from varjax.cache.state import KVState
from varjax.cache.write import Entries, after, destinations, store


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
    state = KVState(jnp.zeros((2, 3, 4, 6)))
    kv = jnp.arange(2 * 3 * 6, dtype=jnp.float32).reshape(2, 1, 3, 6) + 1
    slots = jnp.array([[5, 12, 0], [11, 2, 99]])
    result = store(state, slots, Entries.encode(kv, jnp.float32)).kv_pool
    result, kv = np.asarray(result).reshape(2, 12, 6), kv[:, 0]
    np.testing.assert_array_equal(result[0, [5, 0]], kv[0, [0, 2]])
    np.testing.assert_array_equal(result[1, [11, 2]], kv[1, :2])
    assert (result != 0).any(-1).sum() == 4


def test_int8_entries():
    """Keys and values come back within half a step of their own largest magnitude; moving them
    does not round again."""
    state = KVState(jnp.zeros((2, 3, 4, 6), jnp.int8), jnp.zeros((2, 3, 8)))
    kv = np.random.default_rng(0).standard_normal((2, 1, 3, 6)).astype(np.float32)
    kv[0, 0, 0, :3] = 0
    slots = jnp.array([[5, 12, 0], [11, 2, 99]])
    state = store(state, slots, Entries.encode(jnp.asarray(kv), jnp.int8))
    read = Entries.read(state, jnp.array([[[5, 0]], [[11, 2]]]))
    found = read.values.reshape(2, 1, 2, 2, 3) * read.scales[..., None]
    wanted = np.stack([kv[0][:, [0, 2]], kv[1][:, :2]]).reshape(2, 1, 2, 2, 3)
    step = np.abs(wanted).max(-1, keepdims=True) / 127
    assert (np.abs(found - wanted) <= 0.5001 * step).all()
    assert (np.asarray(state.kv_pool) != 0).any(-1).sum() == 4
    moved = store(state, jnp.array([[7, 8], [7, 8]]), read)
    again = Entries.read(moved, jnp.array([[[7, 8]], [[7, 8]]]))
    np.testing.assert_array_equal(again.values, read.values)
    np.testing.assert_array_equal(again.scales, read.scales)


def test_after_keeps_values():
    slots = jnp.arange(6).reshape(2, 3)
    for value in (0.0, jnp.nan, -jnp.inf, jnp.inf):
        np.testing.assert_array_equal(after(slots, jnp.full((4,), value)), slots)


def test_pool_is_updated_in_place():
    """A scanned read-then-write of a donated pool: no copy of its shape, temporaries below one
    pool."""
    rows, blocks, size, width, layers = 2, 512, 16, 64, 4

    def layer(state, slots):
        flat = state.kv_pool.reshape(rows, -1, width)
        old = flat[jnp.arange(rows)[:, None], slots[None]]
        read = jnp.tanh(old @ jnp.ones((width, width)))
        entries = Entries.encode(read[:, None], jnp.float32)
        return store(state, after(slots[None], read), entries), read.sum()

    slots = jnp.arange(layers * 32).reshape(layers, 32)
    pool = jnp.zeros((rows, blocks, size, width))
    program = (
        jax.jit(lambda p: jax.lax.scan(layer, KVState(p), slots), donate_argnums=0)
        .lower(pool)
        .compile()
    )
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes
    shapes = rf"f32\[{rows},({blocks},{size}|{blocks * size}),{width}\]"
    assert not re.search(rf"= {shapes}\S* copy\(", program.as_text())
