"""Ragged attention on TPU (Mosaic), and sums of its weights over queries. See `api`.

A grid step is a tile of queries of some heads of one row: as many heads as lie in 128 lanes of the
projection, and more where the scale is small (`tpu_projection`). For every head it reads the
scale's own keys first, while stored blocks are copied, then the stored keys (`tpu_blocks`). At
least one own key is valid, so the running maximum is finite from the first step on.

Keys are rows and queries are lanes, so scores are [keys, queries]. The softmax statistics are then
single rows, whose maximum and sum need no work across lanes; the mask of keys is a column that all
queries share; and the log-sum-exp is already the row that is stored. The output is accumulated
transposed, [H, queries], for a pair of heads one above the other, and turned once at the end.

Two heads of 64 share 128 lanes, which a TPU multiplies in any case. The queries of one head stand
in the first lanes with zeros behind them. The pool has a head's keys in the first lanes, too, and
its values behind them, where they meet the zeros. Own keys are turned so that those of the head
come first.

HBM traffic in bytes, e and b bytes per element of projection and pool, P_n slots of the blocks that
head n has in use, tiles = ceil(T / block_q):

    4 R N T H e (q, k, v, out) + R tiles sum_n 2 P_n H b

An int8 pool adds its scales, 8 bytes per slot but at least 512 per block. Vector memory holds own K
and V twice (the next heads' are fetched meanwhile), tiles of q and out twice, cosines and sines of
all tokens where keys are rotated, and scores of one step. A tile of 512 queries does 512 operations
per byte of bfloat16 keys. At its peaks a v5e does 240 operations per byte of memory, a v6e 560.

Sums of weights. A grid step is some heads of one row, whose queries and own keys lie in vector
memory. For every group of keys a loop over the queries computes exp(score - lse) again, keys in
rows and queries in lanes as above. It adds the weighted columns into 128 lanes, which are summed
across once per group. No array of queries by keys exists.

HBM traffic in bytes: 2 R N T H e for queries and keys, R sum_n (2 P_n H
b) for whole blocks, whose values are copied but not used, and 4 R N (P + T) for results, twice that
with squares.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels import estimates
from pallas_kernels.cache_write import tpu as cache_write
from pallas_kernels.ragged_attention import tpu_blocks
from pallas_kernels.ragged_attention.config import tpu_vmem_limit
from pallas_kernels.ragged_attention.reference import dot, in_turn
from pallas_kernels.ragged_attention.tpu_blocks import MAX_GROUP, Blocks
from pallas_kernels.refs import Ref
from pallas_kernels.shared.tpu_operands import LANES, balanced, rounded
from pallas_kernels.shared.tpu_projection import HeadGroups, OwnTokens, operands, tokens_of_step


def attend(projection, new_length, kv_pool, table, kv_scale, *, return_lse, interpret, config=None):
    """See `api.attend`. config: tiles; None takes those of `config.choose`."""
    call, config = tpu_blocks.prepare(
        "attend", projection, kv_pool, table, kv_scale, config, interpret
    )
    rows, count, tokens, head_dim = projection.shape
    table = table.with_packed(kv_pool.shape[2])
    heads = HeadGroups.of(projection, table)
    keys = min(config.copy_keys, max(call.block_size, call.slots))  # no group larger than the table
    block_q = balanced(tokens, config.block_q, LANES)  # queries are lanes
    own_keys = balanced(tokens, config.own_keys, 16)  # keys are rows: 16 in a tile of bfloat16
    # Steps are whole, so the last one may read beyond T, where memory is undefined. `own_step`
    # masks what it reads there.
    whole = (rounded(tokens, own_keys), lambda *_: 0)
    given = operands(projection, heads, {"q": (block_q, lambda t, *_: t), "k": whole, "v": whole})
    tiles, rotated = pl.cdiv(tokens, block_q), projection.rotation is not None
    width = heads.count * head_dim
    out = jax.ShapeDtypeStruct((rows, tokens, width), projection.dtype)
    tile = pl.BlockSpec((1, block_q, width // heads.steps), lambda r, n, t, *_: (r, t, n))
    # [R, N, 1, T]: the last two axes of a block have to be multiples of 8 and 128 or whole, and one
    # head of [R, N, T] is neither
    lse = jax.ShapeDtypeStruct((rows, heads.count, 1, tokens), jnp.float32)
    row = pl.BlockSpec((1, heads.step, 1, block_q), lambda r, n, t, *_: (r, n, 0, t))
    statistics = pltpu.VMEM((heads.together, 1, block_q), jnp.float32)
    found = tpu_blocks.call(
        partial(_attend_tile, heads=heads, scale=projection.scale, own_keys=own_keys),
        (new_length, kv_pool, table, kv_scale),
        given,
        [(out, tile), (lse, row)][: 1 + return_lse],
        heads=heads,
        blocks=min(MAX_GROUP, max(1, keys // call.block_size)),
        scratch=[
            pltpu.VMEM((heads.together, block_q, heads.width), projection.dtype),  # queries
            statistics,  # running maximum
            statistics,  # and sum
            pltpu.VMEM((heads.width, block_q), jnp.float32),  # the output, transposed
        ],
        steps=tiles,
        vmem_limit=tpu_vmem_limit(call, config, heads=heads.step, rotated=rotated),
        cost=estimates.attend(
            projection, kv_pool, table, lse=return_lse, tiles=tiles, scales_at_once=LANES
        ),
        interpret=interpret,
        name="ragged_attention",
    )
    out = found[0].reshape(rows, tokens, heads.count, head_dim)[:, :, :count]
    return (out, found[1].reshape(rows, -1, tokens)[:, :count]) if return_lse else out


store_and_attend = in_turn(attend, cache_write.write)


def _attend_tile(
    blocks: Blocks, length_ref, given, results, scratch, *, heads: HeadGroups, scale, own_keys: int
):
    block_q = scratch[0].shape[1]
    length, first = length_ref[0], pl.program_id(2) * block_q
    own = OwnTokens.of(heads, scale, given)

    # Copies start only in tiles that wait for all of them, so that none is left under way for the
    # next grid step, which uses the same buffers and semaphores.
    @pl.when(first >= length)  # padding only: any finite result will do
    def _():
        for ref in results:
            ref[...] = jnp.zeros_like(ref)

    @pl.when(first < length)
    def _():
        blocks.start()  # stored blocks are on their way while the own keys are at work

        def group(i):
            _see_all_keys(own, i, first, blocks, scratch, own_keys, length)
            _finish(heads, i, results, scratch)

        heads.for_each_group(group)


def _see_all_keys(
    own: OwnTokens, group, first, blocks: Blocks, scratch, own_keys: int, length
) -> None:
    """Show a tile of queries of a group of heads all of its keys, own keys first."""
    heads, dtype, (queries, maximum, total, out) = own.heads, own.dtype, scratch
    place = pl.ds(pl.multiple_of(first, LANES), queries.shape[1])
    # Padded queries and what lies beyond T (undefined) need no mask: every query is a lane, no
    # operation on them joins lanes, and lanes beyond T are not written back.
    q = own.queries(group, slice(None), place)
    for which in range(heads.together):
        queries[which] = heads.alone(q, which).astype(dtype)
    # Scratch keeps what the last grid step left. -inf never meets -inf (which would be NaN): the
    # first own step holds token 0, which is always real.
    maximum[...] = jnp.full_like(maximum, -jnp.inf)
    total[...] = jnp.zeros_like(total)
    out[...] = jnp.zeros_like(out)

    def own_step(i, _):
        here, valid = tokens_of_step(i, own_keys, length)
        # values are zeroed as well, because a weight of 0 times NaN is NaN
        k = jnp.where(valid, own.keys(group, here), 0.0)
        v = jnp.where(valid, own.values(group, here), 0.0).T.astype(dtype)
        for which in range(heads.together):
            mine = v[which * heads.size : (which + 1) * heads.size]
            _accumulate(scratch, which, heads.first(k, which).astype(dtype), mine, valid)
        return 0

    jax.lax.fori_loop(0, pl.cdiv(length, own_keys), own_step, 0)
    for which in range(heads.together):
        head = group * heads.together + which

        def stored_step(i, buffer, head=head, which=which):
            kv, valid = blocks.load(head, i, buffer)
            # Where H is no multiple of 128 rows still hold V behind K, so queries need zeros there:
            # rows are cut where lanes would have to be moved.
            if heads.size % LANES == 0:
                k, v = kv[:, : heads.size], kv[:, heads.size :].T
            else:
                k, v = kv, kv.T[heads.size :]
            _accumulate(scratch, which, k.astype(dtype), v.astype(dtype), valid)

        blocks.for_each_group(head, stored_step)


def _accumulate(scratch, which: int, k, v, valid) -> None:
    """One step of the online softmax of one head. k [keys, W], v [H, keys] and valid [keys, 1]
    change the running maximum [1, queries], and the sum [1, queries] and the output [H, queries],
    which are relative to it."""
    queries, maximum_ref, total_ref, out_ref = scratch
    mine = pl.ds(which * len(v), len(v))
    # invalid keys are rows of zeros, whose score of 0 would count; -inf has the weight 0 exactly
    scores = jnp.where(valid, dot(k, queries[which], (1, 1)), -jnp.inf)
    maximum = jnp.maximum(maximum_ref[which], scores.max(axis=0, keepdims=True))
    rescale = jnp.exp(maximum_ref[which] - maximum)  # of the old one: read before it is replaced
    weights = jnp.exp(scores - maximum)
    maximum_ref[which] = maximum
    total_ref[which] = total_ref[which] * rescale + weights.sum(axis=0, keepdims=True)
    out_ref[mine] = out_ref[mine] * rescale + dot(v, weights.astype(v.dtype), (1, 0))


def _finish(heads: HeadGroups, group, results, scratch) -> None:
    """Write the output of a group of heads and, if it is asked for, the log-sum-exp."""
    _, maximum, total, out = scratch
    finished = []
    for which in range(heads.together):
        # total is never 0: the largest score has added exp(0) to it
        finished.append(out[pl.ds(which * heads.size, heads.size)] / total[which])
        if len(results) > 1:
            head = group * heads.together + which
            results[1][0, head] = maximum[which] + jnp.log(total[which])
    found = jnp.concatenate(finished, axis=0).T.astype(results[0].dtype)
    results[0][0, :, heads.lanes(group)] = found


# --- sums over queries ---


def attention_moments(
    projection, new_length, kv_pool, table, sums, kv_scale, *, interpret, config=None
):
    """See `api.attention_moments`. config: tiles; None takes those of `config.choose`."""
    call, config = tpu_blocks.prepare(
        "attention_moments", projection, kv_pool, table, kv_scale, config, interpret
    )
    tokens, table = projection.shape[2], table.with_packed(kv_pool.shape[2])
    heads = HeadGroups.of(projection, table)
    # Groups and steps of own keys are multiples of 128: a key is a lane of the result, and rows of
    # results are stored at places that are multiples of their size.
    size = call.block_size
    blocks = min(MAX_GROUP, max(1, rounded(config.copy_keys, LANES) // size))
    # of all groups, at least one; the last one may extend beyond the table
    slots = max(blocks * size, rounded(call.slots, blocks * size))
    own_keys = min(rounded(config.own_keys, LANES), rounded(tokens, LANES))
    block_q = balanced(tokens, config.block_q, LANES)
    all_queries, all_own = rounded(tokens, block_q), rounded(tokens, own_keys)
    # one number per query, padded: `_sums` takes the weight 0 for "no query"
    tail = all_queries - tokens
    weights = jnp.pad(sums.weights.astype(jnp.float32), (0, tail))[None]
    lse = jnp.pad(heads.padded(sums.lse, 1), ((0, 0), (0, 0), (0, tail)))[:, :, None]
    given = {
        "weights": (weights, pl.BlockSpec(weights.shape, lambda *_: (0, 0))),
        "lse": (lse, _row(len(lse), heads, all_queries)[1]),
    }
    parts = {"q": (all_queries, lambda *_: 0), "k": (all_own, lambda *_: 0)}
    given |= operands(projection, heads, parts)
    rotated = projection.rotation is not None
    found = tpu_blocks.call(
        partial(_sum_columns, partial(OwnTokens.of, heads, projection.scale), own_keys, block_q),
        (new_length, kv_pool, table, kv_scale),
        given,
        [_row(len(kv_pool), heads, width) for width in [slots, all_own] * (1 + sums.squares)],
        heads=heads,
        blocks=blocks,
        scratch=[pltpu.VMEM((heads.together, all_queries, heads.width), projection.dtype)],
        steps=1,
        vmem_limit=tpu_vmem_limit(call, config, heads=heads.step, rotated=rotated),
        cost=estimates.attention_moments(
            projection, kv_pool, table, squares=sums.squares, halves=2, scales_at_once=LANES
        ),
        interpret=interpret,
        name="attention_moments",
    )
    count = projection.shape[1]
    columns = [  # of the table and of the own tokens, side by side
        jnp.concatenate([old[:, :count, 0, : call.slots], own[:, :count, 0, :tokens]], axis=-1)
        for old, own in zip(found[::2], found[1::2], strict=True)
    ]
    return columns[0], columns[1] if sums.squares else None


def _row(rows: int, heads: HeadGroups, width: int) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    """An array [R, N, 1, width], and the part of it in a grid step: rows of its heads."""
    shape = jax.ShapeDtypeStruct((rows, heads.count, 1, width), jnp.float32)
    return shape, pl.BlockSpec((1, heads.step, 1, width), lambda r, n, *_: (r, n, 0, 0))


def _sum_columns(own_of, own_keys: int, block_q: int, blocks, length_ref, given, results, scratch):
    """The results are sums over stored slots and over own tokens, both once more for the squares.
    own_of: makes `OwnTokens` from references."""
    weights, lse, (queries,) = given.pop("weights"), given.pop("lse"), scratch
    own, length = own_of(given), length_ref[0]
    heads = own.heads
    sums_of = partial(_sums, queries, weights, lse, block_q, len(results) // 2)
    blocks.start()  # stored blocks are on their way while the own keys are at work
    # Columns without a key have to be 0, and no loop visits what lies behind the keys in use.
    for ref in results:
        ref[...] = jnp.zeros_like(ref)

    def group(i):
        def finish(step, _):
            here = pl.ds(pl.multiple_of(step * block_q, block_q), block_q)
            q = own.queries(i, here)
            for which in range(heads.together):
                queries[which, here] = heads.alone(q, which).astype(queries.dtype)
            return 0

        jax.lax.fori_loop(0, queries.shape[1] // block_q, finish, 0)

        def own_step(step, _):
            here, valid = tokens_of_step(step, own_keys, length)
            k = own.keys(i, here)
            for which in range(heads.together):
                # lanes of the other head meet zeros of the queries, and NaN times 0 is NaN
                mine = jnp.where(valid, heads.first(k, which), 0.0)
                head = i * heads.together + which
                _put(results[1::2], head, step, sums_of(which, head, mine, valid))
            return 0

        jax.lax.fori_loop(0, pl.cdiv(length, own_keys), own_step, 0)
        for which in range(heads.together):
            head = i * heads.together + which

            def stored_step(step, buffer, head=head, which=which):
                kv, valid = blocks.load(head, step, buffer)
                sums = sums_of(which, head, kv[:, : heads.width], valid)
                _put(results[::2], head, step, sums)

            blocks.for_each_group(head, stored_step)

    heads.for_each_group(group)


def _sums(
    queries: Ref, weights, lse, block_q: int, powers: int, which: int, head, k, valid
) -> list[Array]:
    """Rows [1, keys]: weights of k [keys, W] summed over the queries, and their squares if `powers`
    is 2.

    queries: finished queries of a group of heads, [heads, Q, W]. weights: [1, Q]. lse: [1, heads,
      1, Q]. block_q: queries of a step.
    """
    k = k.astype(queries.dtype)

    def step(i, sums):
        here = pl.ds(pl.multiple_of(i * block_q, block_q), block_q)
        weight = weights[:, here]
        p = jnp.exp(dot(k, queries[which, here], (1, 1)) - lse[0, head, :, here])
        p = jnp.where(weight != 0, p, 0.0)  # padded queries may be NaN, and 0 * NaN is NaN
        terms = [p * weight, p * p * weight][:powers]
        lanes = range(0, block_q, LANES)
        return tuple(
            s + sum(t[:, i : i + LANES] for i in lanes) for s, t in zip(sums, terms, strict=True)
        )

    zeros = (jnp.zeros((len(k), LANES), jnp.float32),) * powers
    sums = jax.lax.fori_loop(0, queries.shape[1] // block_q, step, zeros)
    # Invalid keys are rows of zeros, whose weights are not 0. Turned, the sum runs over rows,
    # not across lanes, and is the row that the result holds.
    return [jnp.where(valid, s, 0.0).T.sum(axis=0, keepdims=True) for s in sums]


def _put(results, head, step, rows) -> None:
    for result, row in zip(results, rows, strict=True):
        size = row.shape[1]
        result[0, head, :, pl.ds(pl.multiple_of(step * size, size), size)] = row
