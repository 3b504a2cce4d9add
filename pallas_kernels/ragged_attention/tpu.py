"""Ragged attention on TPU (Mosaic).

Attention. One grid step is a tile of queries of one head of one row. It reads the scale's own keys
first (at least one is valid, so that the running maximum is finite from then on) while the first
stored blocks are copied, then the stored ones (`tpu_blocks`).

Keys are rows and queries are lanes: scores are [keys, queries]. So the softmax statistics are
single rows, whose maximum and sum need no work across lanes, what masks keys is a column shared by
all queries, and the log-sum-exp leaves as the row it is stored as. The output is accumulated
transposed, [H, queries], and turned once at the end.

HBM traffic in bytes, e and b bytes per element of tokens and pool, P_n slots of the blocks that
head n has in use, tiles = ceil(T / block_q):

    R N (2 T H e (q, out) + 2 T H e (k, v)) + R tiles sum_n 2 P_n H b

with H rounded up to 128 for q and out; int8: + the scales, 8 bytes per slot but at least 512 per
block. Vector memory: own K and V twice (the next head's are fetched meanwhile), tiles of q and out
twice, scores of one step: 6 MiB at T = 4096, H = 128, bfloat16 (compiled for a v5e). A tile of 512
queries does 512 operations per byte of bfloat16 keys; the peaks of a v5e are 240 apart, those of a
v6e 560.

Moments. One grid step is one head of one row, whose queries and own keys lie in vector memory. For
every group of keys a loop over the queries recomputes exp(score - lse), keys in rows and queries in
lanes as above, and adds the weighted columns into 128 lanes, which are summed across once per
group. No [queries, keys] array exists.

HBM traffic of the moments: R N (Q + T) H e with H rounded up to 128, R sum_n (2 P_n H b) for whole
blocks, though their values are not used, and results of 4 R N (P + T), twice with `squares`. Vector
memory: queries and own keys twice, 4 MiB at Q = T = 4096, H = 128, bfloat16.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_attention import tpu_blocks
from pallas_kernels.ragged_attention.tpu_blocks import Blocks, Grouping, dot, load_own, split
from pallas_kernels.tpu_operands import LANES, balanced, packed_tokens, rounded, whole_head


def attend(projection, new_length, kv_pool, table, kv_scale, *, return_lse, interpret, config=None):
    """See `api.attend`. config: tiles; None takes those of `config.choose`."""
    q, k_new, v_new = projection.queries(), projection.keys(), projection.values()
    table = table.sliced()
    arrays = (projection, kv_pool, table, kv_scale)
    call, config = tpu_blocks.prepare("attend", *arrays, config, interpret)
    rows, heads, tokens, head_dim = q.shape
    keys = min(config.copy_keys, max(call.block_size, call.slots))  # no group larger than the table
    block_q = balanced(tokens, config.block_q, LANES)  # queries are lanes
    own_keys = balanced(tokens, config.own_keys, 16)  # keys are rows: 16 in a tile of bfloat16
    tile = pl.BlockSpec((1, 1, block_q, head_dim), lambda r, n, t: (r, n, t, 0))
    # Steps are whole, so the last one may read beyond T, where K and V are undefined: `load_own`
    # masks them.
    own_tokens = rounded(tokens, own_keys)
    own = [(array, whole_head(array, own_tokens)) for array in packed_tokens(k_new, v_new)]
    # [R, N, 1, T]: the last two axes of a block have to be multiples of 8 and 128 or whole, and one
    # head of [R, N, T] is neither
    row = pl.BlockSpec((1, 1, 1, block_q), lambda r, n, t: (r, n, 0, t))
    lse = (jax.ShapeDtypeStruct((rows, heads, 1, tokens), jnp.float32), row)
    pairs = rows * heads * tokens * (call.slots + tokens)
    found = tpu_blocks.attention_call(
        partial(_attend_tile, own_keys=own_keys),
        *(call, config, Grouping.of(call, keys), (new_length, kv_pool, table, kv_scale)),
        [(q, tile), *own],
        [(jax.ShapeDtypeStruct(q.shape, v_new.dtype), tile)] + [lse] * return_lse,
        scratch=[
            *[pltpu.VMEM((1, block_q), jnp.float32)] * 2,  # running maximum and sum
            pltpu.VMEM((head_dim, block_q), jnp.float32),  # output, transposed
        ],
        grid=(rows, heads, pl.cdiv(tokens, block_q)),
        cost=(4 * pairs * head_dim, pairs, 4 * q.size * k_new.dtype.itemsize),
        interpret=interpret,
        name="ragged_attention",
    )
    out = found[0].transpose(0, 2, 1, 3)
    return (out, found[1].reshape(rows, heads, tokens)) if return_lse else out


def _attend_tile(blocks: Blocks, length_ref, given, results, sums, *, own_keys: int):
    q_ref, *own = given
    length, first = length_ref[0], pl.program_id(2) * q_ref.shape[2]

    # Copies start only in tiles that wait for all of them, so that none is left under way for the
    # next grid step, which uses the same buffers and semaphores.
    @pl.when(first >= length)  # padding only: any finite result will do
    def _():
        for result in results:
            result[...] = jnp.zeros_like(result)

    @pl.when(first < length)
    def _():
        blocks.start()  # on their way while the own keys are at work
        _see_all_keys(q_ref, own, blocks, sums, own_keys, length)
        _finish(results, sums)


def _see_all_keys(q_ref, own, blocks: Blocks, sums, own_keys: int, length) -> None:
    """All keys that a tile of queries sees, own ones first."""
    dtype = own[0].dtype
    # Padded queries and what lies beyond T (undefined) need no mask: every query is a lane, no
    # operation below joins lanes, and lanes beyond T are not written back.
    q = q_ref[0, 0].astype(dtype)
    maximum, total, out = sums
    # Scratch keeps what the last grid step left. -inf never meets -inf (which would be NaN): the
    # first own step holds token 0, which is always real.
    maximum[...] = jnp.full_like(maximum, -jnp.inf)
    total[...] = jnp.zeros_like(total)
    out[...] = jnp.zeros_like(out)

    def own_step(i, _):
        parts, valid = load_own(own, i * own_keys, own_keys, length)
        k, v = split(parts[0]) if len(parts) == 1 else (parts[0], parts[1].T)
        _accumulate(q, k.astype(dtype), v.astype(dtype), valid, sums)
        return 0

    def stored_step(group):
        kv, valid = blocks.load(group)
        k, v = split(kv)
        _accumulate(q, k.astype(dtype), v.astype(dtype), valid, sums)

    jax.lax.fori_loop(0, pl.cdiv(length, own_keys), own_step, 0)
    blocks.for_each_group(stored_step)


def _accumulate(q, k, v, valid, sums) -> None:
    """Online softmax: q [queries, H], k [keys, H], v [H, keys], valid [keys, 1] into the running
    maximum and sum [1, queries] and the output [H, queries], which are relative to the maximum."""
    maximum_ref, total_ref, out_ref = sums
    # invalid keys are rows of zeros, whose score of 0 would count; -inf has the weight 0 exactly
    scores = jnp.where(valid, dot(k, q, (1, 1)), -jnp.inf)
    maximum = jnp.maximum(maximum_ref[...], scores.max(axis=0, keepdims=True))
    rescale = jnp.exp(maximum_ref[...] - maximum)  # of the old maximum: read before it is replaced
    weights = jnp.exp(scores - maximum)
    maximum_ref[...] = maximum
    total_ref[...] = total_ref[...] * rescale + weights.sum(axis=0, keepdims=True)
    out_ref[...] = out_ref[...] * rescale + dot(v, weights.astype(v.dtype), (1, 0))


def _finish(results, sums) -> None:
    """Write the output and, if it is asked for, the log-sum-exp."""
    maximum, total, out = sums
    # total is never 0: the largest score has added exp(0) to it
    results[0][0, 0] = (out[...] / total[...]).T.astype(results[0].dtype)
    if len(results) > 1:
        results[1][0, 0] = maximum[...] + jnp.log(total[...])


# --- sums over queries ---


def attention_moments(
    projection,
    new_length,
    kv_pool,
    table,
    weights,
    lse,
    kv_scale,
    *,
    squares,
    interpret,
    config=None,
):
    """See `api.attention_moments`. config: tiles; None takes those of `config.choose`."""
    q, k_new, table = projection.queries(), projection.keys(), table.sliced()
    arrays = (projection, kv_pool, table, kv_scale)
    call, config = tpu_blocks.prepare("attention_moments", *arrays, config, interpret)
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
    found = tpu_blocks.attention_call(
        partial(_sum_columns, own_keys=own_keys, block_q=block_q),
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


def _sum_columns(
    blocks: Blocks, length_ref, given, results, scratch, *, own_keys: int, block_q: int
):
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
