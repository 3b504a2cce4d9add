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

from pallas_kernels.ragged_attention.tpu_blocks import (
    Blocks,
    Grouping,
    attention_call,
    dot,
    load_own,
    prepare,
)
from pallas_kernels.tpu_operands import LANES, balanced, rounded, whole_head


def attention_moments(
    q, k_new, new_length, kv_pool, table, weights, lse, kv_scale, *, squares, interpret, config=None
):
    """See `api.attention_moments`. config: tiles; None takes those of `config.choose`."""
    arrays = (q, k_new, kv_pool, table, kv_scale)
    call, config = prepare("attention_moments", *arrays, config, interpret)
    rows, heads, queries, head_dim = q.shape
    tokens = k_new.shape[2]
    # Groups and pieces of own keys are multiples of 128, because a key is a lane of the result, and
    # rows of results are stored at places that are multiples of their size.
    grouping = Grouping.of(call, rounded(config.copy_keys, LANES))
    own_keys = min(rounded(config.own_keys, LANES), rounded(tokens, LANES))
    block_q = balanced(queries, config.block_q, LANES)
    all_queries, all_own = rounded(queries, block_q), rounded(tokens, own_keys)
    tail = all_queries - queries
    # padded with the weight 0, which `_over_queries` takes for "no query"; what q holds there is
    # undefined
    weights = jnp.pad(weights.astype(jnp.float32), (0, tail))[None]
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, tail)))[:, :, None]
    # whole groups and pieces; the columns behind M blocks and T tokens are cut off below
    widths = [grouping.padded * call.block_size, all_own] * (2 if squares else 1)
    pairs = rows * heads * queries * (call.slots + tokens)
    moved = q.size * q.dtype.itemsize + k_new.size * k_new.dtype.itemsize
    moved += 4 * rows * heads * (call.slots + tokens)
    found = attention_call(
        partial(_kernel, own_keys=own_keys, block_q=block_q),
        *(call, config, grouping, (new_length, kv_pool, table, kv_scale)),
        [
            (weights, pl.BlockSpec(weights.shape, lambda r, n: (0, 0))),
            (lse, _row_spec(all_queries)),
            (q, whole_head(q, all_queries)),
            (k_new, whole_head(k_new, all_own)),
        ],
        [(jax.ShapeDtypeStruct((rows, heads, 1, w), jnp.float32), _row_spec(w)) for w in widths],
        scratch=[],
        grid=(rows, heads),
        cost=(2 * pairs * head_dim + 4 * pairs, pairs, moved),
        interpret=interpret,
        name="attention_moments",
    )
    sums = [
        jnp.concatenate([old[:, :, 0, : call.slots], own[:, :, 0, :tokens]], axis=-1)
        for old, own in zip(found[::2], found[1::2], strict=True)
    ]
    return sums[0], sums[1] if squares else None


def _row_spec(width: int) -> pl.BlockSpec:
    """One row of an array [R, N, 1, width]."""
    return pl.BlockSpec((1, 1, 1, width), lambda r, n: (r, n, 0, 0))


def _kernel(blocks: Blocks, length_ref, given, results, scratch, *, own_keys: int, block_q: int):
    """Results: over stored slots and over own tokens; both once more for the squares."""
    weights, lse, q_ref, k_ref = given
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
