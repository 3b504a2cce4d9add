"""Stores go where they should, with the fewest moves, in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write import block_writes, reference
from pallas_kernels.cache_write.reference import order_after
from pallas_kernels.projection import Projection
from varjax.core import state as module
from varjax.core.state import KVState, arrange

store, store_encoded = jax.jit(module.store), jax.jit(module.store_encoded)
read_encoded = jax.jit(module.read_encoded)
encode = jax.jit(reference.encode, static_argnums=2)


@pytest.mark.parametrize("seed", range(2))
def test_arrange_fills_a_prefix_with_the_fewest_moves(seed):
    """Also where slots of the table belong to other heads."""
    rng = np.random.default_rng(seed)
    rows, heads, stored, new, columns = 2, 3, 6, 5, int(rng.integers(4, 12))
    places = rng.random((rows, heads, columns)) < (0.7 if seed % 2 else 1.0)
    keep = rng.random((rows, heads, stored + new)) < 0.5
    keep[..., : min(stored, columns)] &= places[..., :stored]  # nothing is stored elsewhere
    keep &= np.cumsum(keep, -1) <= places.sum(-1, keepdims=True)
    stays = rng.random((rows, heads)) < 0.7
    found = jax.jit(arrange, static_argnums=1)(keep, stored, stays, places)
    contents, fresh = map(np.asarray, found)
    assert contents.shape == fresh.shape == (rows, heads, columns)
    for r, n in np.ndindex(rows, heads):
        kept, mine = np.flatnonzero(keep[r, n]), np.flatnonzero(places[r, n])
        filled = mine[: kept.size]
        assert sorted(contents[r, n, filled]) == list(kept)  # a prefix, every candidate once
        rest = np.setdiff1d(np.arange(columns), filled)
        assert (contents[r, n, rest] == -1).all() and not fresh[r, n, rest].any()
        still = {c for c in kept if stays[r, n] and c < stored and c in filled}
        assert {contents[r, n, p] for p in filled if not fresh[r, n, p]} == still
        assert all(contents[r, n, c] == c for c in still)


def test_store_writes_only_listed_slots():
    state = KVState(jnp.zeros((2, 3, 4, 6)))
    kv = jnp.arange(2 * 3 * 6, dtype=jnp.float32).reshape(2, 1, 3, 6) + 1
    writes = block_writes(np.array([[[5, -1, 0]], [[11, 2, -1]]]), 4)
    projection = Projection.of(kv[..., :3], kv[..., :3], kv[..., 3:])
    result = store(state, projection, jax.tree.map(jnp.asarray, writes)).kv_pool
    result, kv = np.asarray(result).reshape(2, 12, 6), kv[:, 0]
    np.testing.assert_array_equal(result[0, [5, 0]], kv[0, [0, 2]])
    np.testing.assert_array_equal(result[1, [11, 2]], kv[1, :2])
    assert (result != 0).any(-1).sum() == 4


def test_int8_tokens():
    """Keys and values come back within half a step of their own largest magnitude; moving them
    does not round again."""
    state = KVState(jnp.zeros((2, 3, 4, 6), jnp.int8), jnp.zeros((2, 3, 8)))
    kv = np.random.default_rng(0).standard_normal((2, 1, 3, 6)).astype(np.float32)
    kv[0, 0, 0, :3] = 0
    slots = jnp.array([[[5, 12, 0]], [[11, 2, 99]]])
    tokens = encode(jnp.asarray(kv[..., :3]), jnp.asarray(kv[..., 3:]), jnp.int8)
    state = store_encoded(state, slots, tokens)
    read = read_encoded(state, jnp.array([[[5, 0]], [[11, 2]]]))
    found = read[0].reshape(2, 1, 2, 2, 3) * read[1][..., None]
    wanted = np.stack([kv[0][:, [0, 2]], kv[1][:, :2]]).reshape(2, 1, 2, 2, 3)
    step = np.abs(wanted).max(-1, keepdims=True) / 127
    assert (np.abs(found - wanted) <= 0.5001 * step).all()
    assert (np.asarray(state.kv_pool) != 0).any(-1).sum() == 4
    moved = store_encoded(state, jnp.array([[[7, 8]], [[7, 8]]]), read)
    again = read_encoded(moved, jnp.array([[[7, 8]], [[7, 8]]]))
    np.testing.assert_array_equal(again[0], read[0])
    np.testing.assert_array_equal(again[1], read[1])


def test_after_keeps_values():
    slots = jnp.arange(6).reshape(2, 3)
    for value in (0.0, jnp.nan, -jnp.inf, jnp.inf):
        np.testing.assert_array_equal(order_after(slots, jnp.full((4,), value)), slots)


def test_pool_is_updated_in_place():
    """A scanned read-then-write of a donated pool: no copy of its shape, temporaries below one
    pool."""
    rows, blocks, size, width, layers = 2, 512, 16, 64, 4

    def layer(state, slots):
        flat = state.kv_pool.reshape(rows, -1, width)
        old = flat[jnp.arange(rows)[:, None], slots[None]]
        read = jnp.tanh(old @ jnp.ones((width, width)))
        k, v = jnp.split(read[:, None], 2, axis=-1)
        tokens = encode(k, v, jnp.float32)
        where = jnp.broadcast_to(order_after(slots[None, None], read), (rows, 1, len(slots)))
        return store_encoded(state, where, tokens), read.sum()

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
