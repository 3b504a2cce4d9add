"""The reference against a float64 NumPy oracle that reads the table slot by slot."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import chips
from pallas_kernels.projection import Projection
from pallas_kernels.ragged_attention import (
    BlockTable,
    QuerySums,
    attend,
    attention_moments,
    attention_scores,
    reference,
)

ROWS, HEADS, TOKENS, SIZE, BLOCKS, BLOCK, ENTRIES = 2, 3, 5, 4, 7, 4, 3
LENGTH = 4


def problem(seed: int, per_row: bool = False):
    """Random queries, keys, values, pool (NaN where no table entry points) and table: empty,
    partial, repeated and full entries."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal((ROWS, HEADS, TOKENS, SIZE)).astype(np.float32) for _ in range(3)
    )
    shape = (ROWS, HEADS, ENTRIES) if per_row else (HEADS, ENTRIES)
    ids = rng.integers(0, BLOCKS, shape).astype(np.int32)
    start = rng.integers(0, BLOCK, shape).astype(np.int32)
    stop = np.minimum(start + rng.integers(0, BLOCK + 1, shape), BLOCK).astype(np.int32)
    ids[..., 0, 1], start[..., 0, 1], stop[..., 0, 1] = ids[..., 0, 0], 2, 4  # one block twice,
    start[..., 0, 0], stop[..., 0, 0] = 0, 1  # with disjoint ranges
    stop[..., 1, :] = start[..., 1, :]  # an empty head
    start[..., 2, :], stop[..., 2, :] = 0, BLOCK  # a full head
    pool = np.full((ROWS, BLOCKS, BLOCK, 2 * SIZE), np.nan, np.float32)
    for row, _head, slot in listed(ids, start, stop):
        pool[row, slot // BLOCK, slot % BLOCK] = rng.standard_normal(2 * SIZE)
    return q, k, v, pool, (ids, start, stop)


def listed(ids, start, stop):
    """(row, head, slot) of all valid table entries."""
    full = [
        np.broadcast_to(a if a.ndim == 3 else a[None], (ROWS, HEADS, ENTRIES))
        for a in (ids, start, stop)
    ]
    for row, head, m in np.ndindex(ROWS, HEADS, ENTRIES):
        block, a, b = (x[row, head, m] for x in full)
        for offset in range(a, b):
            yield row, head, int(block * BLOCK + offset)


def oracle(q, k, v, pool, table):
    """(output [R, N, T, H], weights {(row, head): [T, slots + own]}) in float64."""
    out, weights = np.zeros(q.shape), {}
    slots = {
        (r, n): [s for rr, nn, s in listed(*table) if (rr, nn) == (r, n)]
        for r, n in np.ndindex(ROWS, HEADS)
    }
    for (r, n), mine in slots.items():
        stored = pool[r].reshape(-1, 2 * SIZE)[mine].astype(np.float64)
        keys = np.concatenate([stored[:, :SIZE], k[r, n, :LENGTH]])
        values = np.concatenate([stored[:, SIZE:], v[r, n, :LENGTH]])
        scores = q[r, n].astype(np.float64) @ keys.T
        p = np.exp(scores - scores.max(-1, keepdims=True))
        weights[r, n] = p / p.sum(-1, keepdims=True)
        out[r, n] = weights[r, n] @ values
    return out, weights


@pytest.mark.aot
def test_layers_share_their_memory():
    """Of several layers one after the other: XLA used to make results for all of them at once."""
    if why := chips.why_unavailable("rtx4090"):
        pytest.skip(why)
    where = SingleDeviceSharding(chips.compile_only_devices("rtx4090")[0])
    rows, tokens, heads, size, layers, block = 16, 1024, 8, 64, 24, 16
    assert reference.rows_at_once(heads, tokens, tokens) < rows
    width = heads * size

    def run(x, matrices, pool, ids):
        table = BlockTable(ids, jnp.zeros_like(ids), jnp.full_like(ids, block))
        for matrix in matrices:
            projection = Projection((x @ matrix).reshape(rows, tokens, 3, heads, size))
            found = reference.attend(projection, tokens, pool, table, None, return_lse=False)
            x += found.reshape(x.shape)
        return x

    def shape(*numbers, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(numbers, dtype, sharding=where)

    given = shape(rows, tokens, width), [shape(width, 3 * width)] * layers
    lowered = jax.jit(run).lower(
        *given, shape(rows, 8, block, 2 * size), shape(heads, 4, dtype=jnp.int32)
    )
    compiled = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    results = 2 * rows * tokens * width  # bytes of a layer's
    # scores of two rows and a layer's own arrays are the rest
    assert compiled.memory_analysis().temp_size_in_bytes < layers * results * 0.7


@pytest.mark.parametrize("per_row", [False, True])
def test_attend(per_row):
    run = jax.jit(attend)
    for seed in range(3):
        q, k, v, pool, table = problem(seed, per_row)
        arrays = BlockTable(*map(jnp.asarray, table))
        projection = Projection.of(*map(jnp.asarray, (q, k, v)))
        found = run(projection, jnp.int32(LENGTH), jnp.asarray(pool), arrays)
        expected = oracle(q, k, v, pool, table)[0].transpose(0, 2, 1, 3)
        chex.assert_trees_all_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("per_row", "at_once"), [(False, 2), (True, 3)])
def test_rows_that_take_turns(monkeypatch, per_row, at_once):
    """Five rows by pairs or threes, with a rest, as all together."""
    parts = [problem(seed, per_row) for seed in range(3)]
    q, k, v, pool = (jnp.asarray(np.concatenate([part[i] for part in parts])[:5]) for i in range(4))
    tables = [part[4] for part in parts]
    table = [np.concatenate(a)[:5] for a in zip(*tables, strict=True)] if per_row else tables[0]
    if not per_row:  # the first problem's table points at slots that are NaN in the others' pools
        pool = jnp.nan_to_num(pool)
    given = (Projection.of(q, k, v), jnp.int32(LENGTH), pool, BlockTable(*map(jnp.asarray, table)))

    def compiled():
        return jax.jit(lambda given: reference.attend(*given, None, return_lse=True))(given)

    together = compiled()
    row = 4 * HEADS * TOKENS * (ENTRIES * BLOCK + TOKENS)
    monkeypatch.setattr(reference, "SCORES_BYTES", at_once * row)
    assert reference.rows_at_once(HEADS, TOKENS, ENTRIES * BLOCK + TOKENS) == at_once
    traced = str(jax.make_jaxpr(lambda: reference.attend(*given, None, return_lse=True))())
    assert f"length={5 // at_once}" in traced
    by_turns = compiled()
    chex.assert_trees_all_close(by_turns, together, rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk", [2, 256])
def test_attention_moments(monkeypatch, chunk):
    monkeypatch.setattr(reference, "CHUNK", chunk)
    q, k, v, pool, table = problem(7)
    query_weights = np.array([0.5, 0.25, 0.25, 0, 0], np.float32)
    arrays = BlockTable(*map(jnp.asarray, table))
    given = (
        Projection.of(*map(jnp.asarray, (q, k, v))),
        jnp.int32(LENGTH),
        jnp.asarray(pool),
        arrays,
    )
    _, lse = attend(*given, return_lse=True)
    found, squares = attention_moments(
        *given, QuerySums(jnp.asarray(query_weights), lse, squares=True)
    )
    mask = np.asarray(arrays.slot_mask(BLOCK))
    _, weights = oracle(q, k, v, pool, table)
    for r, n in np.ndindex(ROWS, HEADS):
        columns = np.concatenate([np.flatnonzero(mask[n]), ENTRIES * BLOCK + np.arange(LENGTH)])
        chex.assert_trees_all_close(
            np.asarray(found)[r, n, columns], query_weights @ weights[r, n], atol=1e-6
        )
        chex.assert_trees_all_close(
            np.asarray(squares)[r, n, columns], query_weights @ weights[r, n] ** 2, atol=1e-6
        )
        others = np.delete(np.asarray(found)[r, n], columns)
        assert (others == 0).all()


def test_attention_scores_agree_with_the_weights():
    q, k, v, pool, table = problem(5)
    arrays = BlockTable(*map(jnp.asarray, table))
    some = jnp.asarray(q)[:, :, jnp.array([3, 0])]
    found = attention_scores(some, jnp.asarray(k), jnp.int32(LENGTH), jnp.asarray(pool), arrays)
    mask = np.asarray(arrays.slot_mask(BLOCK))
    _, weights = oracle(q, k, v, pool, table)
    for r, n in np.ndindex(ROWS, HEADS):
        columns = np.concatenate([np.flatnonzero(mask[n]), ENTRIES * BLOCK + np.arange(LENGTH)])
        score = np.asarray(found)[r, n][:, columns]
        p = np.exp(score - score.max(-1, keepdims=True))
        chex.assert_trees_all_close(p / p.sum(-1, keepdims=True), weights[r, n][[3, 0]], atol=1e-6)


def test_int8_pool():
    """Numbers times scales, as if the pool held the products."""
    q, k, v, pool, table = problem(2)
    arrays = BlockTable(*map(jnp.asarray, table))
    rng = np.random.default_rng(0)
    whole = rng.integers(-127, 128, pool.shape).astype(np.int8)
    scale = rng.random((ROWS, BLOCKS, 2, BLOCK)).astype(np.float32)
    product = whole.reshape(ROWS, BLOCKS, BLOCK, 2, SIZE) * np.moveaxis(scale, 2, 3)[..., None]
    expected, _ = oracle(q, k, v, product.reshape(pool.shape), table)
    scale[np.isnan(pool[..., 0])[:, :, None].repeat(2, 2)] = np.nan
    found = attend(
        Projection.of(*map(jnp.asarray, (q, k, v))),
        jnp.int32(LENGTH),
        jnp.asarray(whole),
        arrays,
        kv_scale=jnp.asarray(scale.reshape(ROWS, BLOCKS, 2 * BLOCK)),
    )
    expected = expected.transpose(0, 2, 1, 3)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("entries", [0, 3, 32, 40])
def test_packed_tables_say_which_entries_are_partial(entries):
    """A bit per entry, also for empty ones and for those behind the last."""
    rng = np.random.default_rng(entries)
    start = rng.choice([0, 0, 0, 2], (HEADS, entries)).astype(np.int32)
    stop = np.maximum(start, rng.choice([BLOCK, BLOCK, 3], start.shape)).astype(np.int32)
    table = BlockTable(np.zeros_like(start), start, stop).with_packed(BLOCK)
    words = np.asarray(table.packed)[:, 0, 2 * entries + 1 :]
    assert words.shape == (HEADS, max(1, -(-entries // 32)))
    bits = (words[..., None] >> np.arange(32) & 1).reshape(HEADS, -1)
    chex.assert_trees_all_equal(bits[:, :entries] == 1, (start > 0) | (stop < BLOCK))
    assert bits[:, entries:].all()
