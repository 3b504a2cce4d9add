"""Sums of attention weights over queries on TPU (Mosaic). See `api.attention_moments` for what it
computes.

A grid step is some heads of one row, whose queries and own keys lie in vector memory. For every
group of keys a loop over the queries computes exp(score - lse) again, keys in rows and queries in
lanes as in `tpu`. It adds the weighted columns into 128 lanes, which are summed across once per
group. No array of queries by keys exists.

HBM traffic in bytes, with the letters of `tpu`: 2 R N T H e for queries and keys, R sum_n (2 P_n H
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
from pallas_kernels.ragged_attention import tpu_blocks
from pallas_kernels.ragged_attention.config import tpu_vmem_limit
from pallas_kernels.ragged_attention.tpu_blocks import MAX_GROUP, dot
from pallas_kernels.refs import Ref
from pallas_kernels.tpu_operands import LANES, balanced, rounded
from pallas_kernels.tpu_projection import Heads, OwnTokens, operands, tokens_of_step


def attention_moments(
    projection, new_length, kv_pool, table, sums, kv_scale, *, interpret, config=None
):
    """See `api.attention_moments`. config: tiles; None takes those of `config.choose`."""
    call, config = tpu_blocks.prepare(
        "attention_moments", projection, kv_pool, table, kv_scale, config, interpret
    )
    tokens, table = projection.shape[2], table.with_packed(kv_pool.shape[2])
    heads = Heads.of(projection, table)
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


def _row(rows: int, heads: Heads, width: int) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
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
