"""Attention weights summed over queries, on TPU (Mosaic).

One grid step is one head of one row, whose queries and own keys lie in vector memory. For every
group of keys a loop over the queries recomputes exp(score - lse), keys in rows and queries in lanes
as in `tpu`, and adds the weighted columns into 128 lanes, which are summed across once per group.
No [queries, keys] array exists.

HBM traffic in bytes, letters as in `tpu`: R N (Q + T) H e with H rounded up to 128, R sum_n (2 P_n
H b) for whole blocks, though their values are not used, and results of 4 R N (P + T), twice with
`squares`. Vector memory: queries and own keys twice, 4 MiB at Q = T = 4096, H = 128, bfloat16.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.ragged_attention.tpu_blocks import (
    Blocks,
    Grouping,
    check,
    compiler_params,
    dot,
    load_own,
    pack,
    scratch_shapes,
)
from pallas_kernels.tpu_operands import (
    LANES,
    balanced,
    in_parts,
    pool_specs,
    pools,
    rounded,
    table_spec,
    whole_head,
)


def attention_moments(
    q,
    k_new,
    new_length,
    kv_pool,
    table,
    query_weights,
    lse,
    kv_scale,
    *,
    squares: bool,
    interpret: bool,
    config: tiles.TPUConfig | None = None,
):
    """See `api.attention_moments`. config: tiles; None takes those of `config.choose`."""
    if not interpret:
        check(q, kv_pool, kv_scale)
    call = tiles.Call.of("attention_moments", q, k_new, kv_pool, table)
    config = config or tiles.choose(call, "tpu")
    rows, heads, queries, head_dim = q.shape
    tokens, (entries, block_size) = k_new.shape[2], (table.ids.shape[-1], kv_pool.shape[2])
    # Groups and pieces of own keys are multiples of 128, because a key is a lane of the result, and
    # rows of results are stored at places that are multiples of their size.
    grouping = Grouping.of(entries, block_size, rounded(config.copy_keys, LANES))
    own_keys = min(rounded(config.own_keys, LANES), rounded(tokens, LANES))
    block_q = balanced(queries, config.block_q, LANES)
    all_queries, all_own = rounded(queries, block_q), rounded(tokens, own_keys)
    tail = all_queries - queries
    # padded with the weight 0, which `_over_queries` takes for "no query"; what q holds there is
    # undefined
    weights = jnp.pad(query_weights.astype(jnp.float32), (0, tail))[None]
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, tail)))[:, :, None]
    length, packed = jnp.reshape(new_length, 1).astype(jnp.int32), pack(table, grouping)
    stored = pools(kv_pool, kv_scale, interpret)
    # whole groups and pieces; the columns behind M blocks and T tokens are cut off below
    widths = [grouping.padded * block_size, all_own] * (2 if squares else 1)
    counts = (len(stored), len(widths))
    found = pl.pallas_call(
        partial(_kernel, grouping=grouping, own_keys=own_keys, block_q=block_q, counts=counts),
        grid=(rows, heads),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            table_spec(packed),
            pl.BlockSpec(weights.shape, lambda r, n: (0, 0)),
            _row_spec(all_queries),
            whole_head(q, all_queries),
            whole_head(k_new, all_own),
            *pool_specs(stored),
        ],
        out_specs=[_row_spec(width) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((rows, heads, 1, w), jnp.float32) for w in widths],
        scratch_shapes=scratch_shapes(grouping, stored),
        compiler_params=compiler_params(call, config, axes=2),
        cost_estimate=_cost(q, k_new, kv_pool, entries),
        interpret=interpret,
        name="attention_moments",
    )(length, packed, weights, lse, q, k_new, *stored)
    slots = entries * block_size
    sums = [
        jnp.concatenate([old[:, :, 0, :slots], own[:, :, 0, :tokens]], axis=-1)
        for old, own in zip(found[::2], found[1::2], strict=True)
    ]
    return sums[0], sums[1] if squares else None


def _row_spec(width: int) -> pl.BlockSpec:
    """One row of an array [R, N, 1, width]."""
    return pl.BlockSpec((1, 1, 1, width), lambda r, n: (r, n, 0, 0))


def _cost(q, k_new, kv_pool, entries: int) -> pl.CostEstimate:
    """As if every slot of the table were live."""
    rows, heads, queries, head_dim = q.shape
    stored, tokens = entries * kv_pool.shape[2], k_new.shape[2]
    pairs = rows * heads * queries * (stored + tokens)
    copied = rows * heads * stored * 2 * head_dim * kv_pool.dtype.itemsize
    given = q.size * q.dtype.itemsize + k_new.size * k_new.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * pairs * head_dim + 4 * pairs,
        transcendentals=pairs,
        bytes_accessed=given + copied + 4 * rows * heads * (stored + tokens),
    )


def _kernel(
    length_ref, table, weights, lse, q_ref, k_ref, *refs, grouping, own_keys, block_q, counts
):
    """counts: pools, results. Results: over stored slots and over own tokens; both once more for
    the squares."""
    stored, results, buffers, (semaphores,) = in_parts(refs, *counts, counts[0], 1)
    blocks = Blocks(grouping, pl.program_id(0), table, stored, buffers, semaphores)
    blocks.start()  # on their way while the own keys are at work
    length, head_dim, dtype = length_ref[0], q_ref.shape[3], k_ref.dtype
    over_queries = partial(_over_queries, q_ref, weights, lse, block_q, len(results) // 2)
    # Fresh memory may hold NaN. Pieces behind `length` and groups not in use are never visited, and
    # columns without a key have to be 0.
    for result in results:
        result[...] = jnp.zeros_like(result)

    def own_step(i, _):
        (k,), valid = load_own([k_ref], i * own_keys, own_keys, length)
        _put(results[1::2], i, over_queries(k.astype(dtype), valid))
        return 0

    def stored_step(group):
        kv, valid = blocks.load(group)
        _put(results[::2], group, over_queries(kv[:, :head_dim].astype(dtype), valid))

    jax.lax.fori_loop(0, pl.cdiv(length, own_keys), own_step, 0)
    blocks.for_each_group(stored_step)


def _over_queries(q_ref, weights, lse, block_q: int, powers: int, k, valid) -> list:
    """Rows [1, keys]: weights of k [keys, H] summed over the queries and, if powers is 2, their
    squares."""

    def step(i, sums):
        here = pl.ds(pl.multiple_of(i * block_q, block_q), block_q)
        weight = weights[:, here]
        p = jnp.exp(dot(k, q_ref[0, 0, here].astype(k.dtype), (1, 1)) - lse[0, 0, :, here])
        p = jnp.where(weight != 0, p, 0.0)  # padded queries may be NaN, and 0 * NaN is NaN
        terms = [p * weight, p * p * weight][:powers]
        return tuple(s + _in_lanes(t) for s, t in zip(sums, terms, strict=True))

    zeros = (jnp.zeros((len(k), LANES), jnp.float32),) * powers
    sums = jax.lax.fori_loop(0, q_ref.shape[2] // block_q, step, zeros)
    # Invalid keys are rows of zeros, whose weights are not 0. Turned, the sum runs over rows, not
    # across lanes, and is the row that the result holds.
    return [jnp.where(valid, s, 0.0).T.sum(axis=0, keepdims=True) for s in sums]


def _in_lanes(x):
    """Sum over pieces of 128 lanes."""
    return sum(x[:, i : i + LANES] for i in range(0, x.shape[1], LANES))


def _put(results, step, rows) -> None:
    for result, row in zip(results, rows, strict=True):
        size = row.shape[1]
        result[0, 0, :, pl.ds(pl.multiple_of(step * size, size), size)] = row
