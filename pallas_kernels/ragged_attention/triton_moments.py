"""Column sums of attention on NVIDIA GPUs with Pallas-Triton. See `api.attention_moments`.

Tiling. One program serves `block_k` columns (keys) of one head of one row: it loads their keys
once, walks over the queries in steps of `block_q`, computes weights again from scores and
log-sum-exp, and adds them up per key in float32. No matrix of queries by keys leaves the registers,
and programs whose columns hold no key only write zeros. The walk ends with the last query of
non-zero weight; what queries of weight zero hold (padding) never meets arithmetic.

Traffic, with b bytes per element: from memory R N H b (Q + T + P') in, P' = valid slots of a head,
and R N (P + T) 4 bytes out per moment; queries come from the L2 cache, R N H b Q once per program,
so (P + T) / block_k times.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.ragged_attention.triton_pool import (
    LOG2_E,
    Stored,
    attention_call,
    check,
    dot,
    head_spec,
    last_true,
    line_spec,
    load,
    rows_at,
)


def attention_moments(
    q, k_new, new_length, kv_pool, table, weights, lse, kv_scale, *, squares, interpret, config=None
):
    """See `api.attention_moments`. config: tiles; None takes those of `config.choose`."""
    check(q, kv_pool, kv_scale, interpret)
    call = tiles.Call.of("attention_moments", q, k_new, kv_pool, table)
    config = config or tiles.choose(call, "triton")
    rows, heads, queries, head_dim = q.shape
    stored, own, old = Stored.of(kv_pool, table, kv_scale), k_new.shape[2], call.slots
    # whole lines: the tiles of own keys start at column `old`, which is no multiple of block_k
    sums = (jax.ShapeDtypeStruct((rows, heads, old + own), jnp.float32), head_spec(old + own))
    moments, columns = 2 if squares else 1, rows * heads * (own + stored.keys)
    moved = sum(a.size * a.dtype.itemsize for a in (q, k_new)) + 4 * rows * heads * queries
    moved += 4 * columns * moments
    # Programs own columns, not queries: each sums its columns over all queries by itself, so no two
    # programs add to one number (no atomics, the same result in every run).
    found = attention_call(
        partial(_kernel, stored, config, old),
        *(stored, config, new_length),
        [
            (q, head_spec(queries, head_dim)),
            (k_new, head_spec(own, head_dim)),
            (weights.astype(jnp.float32), line_spec(queries)),
            (lse, head_spec(queries)),
        ],
        [sums] * moments,
        tiles=pl.cdiv(old, config.block_k) + pl.cdiv(own, config.block_k),
        cost=(columns * queries * (2 * head_dim + 2 * moments), columns * queries, moved),
        interpret=interpret,
        name="attention_moments",
    )
    return found[0], found[1] if squares else None


def _kernel(stored: Stored, config, old: int, length_ref, given, refs, out_refs):
    """One tile of columns; tiles of own keys come after those of the `old` slots of the table."""
    q_ref, k_ref, weight_ref, lse_ref = given
    size, queries, own = config.block_k, q_ref.shape[0], k_ref.shape[0]
    key = pl.program_id(0) * size + jnp.arange(size, dtype=jnp.int32)
    token = key - pl.cdiv(old, size) * size  # negative in tiles of the table
    new = (token >= 0) & (token < length_ref[0])
    # In tiles of own keys `key` lies behind the last entry, so nothing is read from the pool; in
    # tiles of the table no own token is. One of the two loads is all zeros, the sum is the other.
    [(k, scale)], owned = stored.read(refs, key, (k_ref.dtype,))
    k += rows_at(k_ref, token, new, stored.head_dim)
    # Scores and log-sum-exp become powers of two; int8: the scale of a key, own keys have none.
    factor = LOG2_E if scale is None else (jnp.where(new, 1, scale) * LOG2_E)[:, None]
    last = last_true(lambda i, inside: load(weight_ref, i, inside) != 0, queries)
    # columns without any key make no step, but are written: the result is 0 there, not unspecified
    steps = jnp.where(
        jnp.max((owned | new).astype(jnp.int32)) > 0, pl.cdiv(last, config.block_q), 0
    )
    sums = tuple(jnp.zeros((size,), jnp.float32) for _ in out_refs)
    walk = partial(_add, config.block_q, k, factor, q_ref, weight_ref, lse_ref)
    sums = jax.lax.fori_loop(0, steps, walk, sums)
    # a tile may reach beyond its part of the columns, into the other one or out of the array
    column = jnp.where(token >= 0, old + token, key)
    inside = jnp.where(token >= 0, token < own, key < old)
    for ref, total in zip(out_refs, sums, strict=True):
        # a column without a key has scores of 0, whose weights are not
        plgpu.store(ref.at[column], jnp.where(owned | new, total, 0), mask=inside)


def _add(size: int, k, factor, q_ref, weight_ref, lse_ref, i, sums):
    """Sums over queries with those of step i."""
    query = i * size + jnp.arange(size, dtype=jnp.int32)
    inside = query < q_ref.shape[0]
    weight, lse = (load(ref, query, inside) for ref in (weight_ref, lse_ref))
    # keys are rows here, so that the sum over queries runs within a row
    q = rows_at(q_ref, query, inside, q_ref.shape[1]).astype(k.dtype)
    scores = dot(k, q, transposed=True) * factor
    p = jnp.exp2(scores - (lse * LOG2_E)[None])
    p = jnp.where((weight != 0)[None], p, 0)  # padded queries may be NaN, and 0 * NaN is NaN
    found = [p * weight[None]]
    if len(sums) == 2:
        found.append(p * found[0])  # p squared, weighted once
    return tuple(a + jnp.sum(b, axis=1) for a, b in zip(sums, found, strict=True))
