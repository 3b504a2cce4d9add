"""Ragged attention on NVIDIA GPUs with Pallas-Triton. See `api` for what it computes.

Tiling of the attention. One program serves `block_q` queries of one head of one row: it holds the
query tile, the float32 accumulator and the running maximum and sum, and walks over keys in steps of
`block_k`: own keys first, then the head's table. Own keys are at least one, so the maximum is
finite from the first step on, and empty heads need no case of their own. (Full steps of own keys
without a mask, and a last one with it, cost more shared memory than they save.)

Stored keys are numbered through the table, so a step joins as many blocks as it needs, for any
block size, and a program stops after the last entry that its head uses. Loads are masked with the
entry's range: invalid slots cost no traffic, and what they hold (NaN) never meets arithmetic. Tiles
of padded queries only write zeros.

Its traffic, with b bytes per element, t real tokens and P' valid slots of a head: the tiles of a
head run side by side, so that its keys come from the L2 cache after the first. From memory then
R N H b (3 t + 2 P') in and R N H b T out; from the cache R N H b 2 (t + P') ceil(t / block_q).
Tables: 8 M bytes per program, and 12 per key of a step, from the cache.

Arithmetic. Scores are products in the type of `k_new` with float32 sums; exponentials are powers of
two of scores times log2(e), float32; weights are rounded to the type of `v_new` before the second
product. int8 keys and values are exact in bfloat16; their scales multiply scores and weights.

Tiling of the moments. One program serves `block_k` columns (keys) of one head of one row: it loads
their keys once, walks over the queries in steps of `block_q`, computes weights again from scores
and log-sum-exp, and adds them up per key in float32. No matrix of queries by keys leaves the
registers, and programs whose columns hold no key only write zeros. The walk ends with the last
query of non-zero weight; what queries of weight zero hold (padding) never meets arithmetic.

Traffic of the moments: from memory R N H b (Q + T + P') in and R N (P + T) 4 bytes out per moment;
queries come from the L2 cache, R N H b Q once per program, so (P + T) / block_k times.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.ragged_attention import triton_pool
from pallas_kernels.ragged_attention.triton_pool import LOG2_E, Stored, dot, head_spec, rows_at


def attend(projection, new_length, kv_pool, table, kv_scale, *, return_lse, interpret, config=None):
    """See `api.attend`. config: tiles; None takes those of `config.choose`."""
    q, k_new, v_new = projection.queries(), projection.keys(), projection.values()
    table = table.sliced()
    triton_pool.check(q, kv_pool, kv_scale, interpret)
    config = config or tiles.choose(tiles.Call.of("attend", projection, kv_pool, table), "triton")
    stored = Stored.of(kv_pool, table, kv_scale)
    rows, heads, tokens, head_dim = q.shape
    tile = pl.BlockSpec((None, None, config.block_q, head_dim), lambda i, n, r: (r, n, i, 0))
    line = pl.BlockSpec((None, None, config.block_q), lambda i, n, r: (r, n, i))
    own, pairs = head_spec(tokens, head_dim), rows * heads * tokens * (tokens + stored.keys)
    lse = (jax.ShapeDtypeStruct(q.shape[:3], jnp.float32), line)
    found = triton_pool.attention_call(
        partial(_attend_tile, stored, config, tokens),
        *(stored, config, new_length),
        [(q, tile), (k_new, own), (v_new, own)],
        [(jax.ShapeDtypeStruct(q.shape, v_new.dtype), tile)] + [lse] * return_lse,
        tiles=pl.cdiv(tokens, config.block_q),
        cost=(4 * pairs * head_dim, pairs, 2 * q.size * (q.dtype.itemsize + v_new.dtype.itemsize)),
        interpret=interpret,
        name="ragged_attention",
    )
    out = found[0].transpose(0, 2, 1, 3)
    return (out, found[1]) if return_lse else out


def _attend_tile(stored: Stored, config, tokens: int, length_ref, given, refs, out_refs):
    q_ref, k_ref, v_ref = given
    length, first = length_ref[0], pl.program_id(0) * config.block_q
    query = first + jnp.arange(config.block_q, dtype=jnp.int32)

    def write(out, *lse):
        # the last tile may reach beyond T, where the next head's rows (or no memory) lie
        plgpu.store(out_refs[0], out.astype(out_refs[0].dtype), mask=(query < tokens)[:, None])
        for ref, value in zip(out_refs[1:], lse, strict=False):  # without return_lse none is left
            plgpu.store(ref, value, mask=query < tokens)

    @pl.when(first < length)
    def _():
        # zeros instead of padded queries (which may be NaN) keep the padding of the result finite
        q = plgpu.load(q_ref, mask=(query < length)[:, None], other=0).astype(k_ref.dtype)
        maximum, total, sums = _walk(stored, config, q, length, k_ref, v_ref, refs)
        # total is never 0: the largest score has added exp2(0) to it
        write(sums / total[:, None], maximum / LOG2_E + jnp.log(total))

    # Written all the same: fresh memory may hold NaN, and the result has to be finite everywhere.
    @pl.when(first >= length)
    def _():
        write(jnp.zeros(q_ref.shape, jnp.float32), jnp.zeros(query.shape, jnp.float32))


def _walk(stored: Stored, config, q, length, k_ref, v_ref, refs):
    """(maximum, sum of weights, weighted sum of values) of a query tile over all its keys."""
    size, head_dim = config.block_k, stored.head_dim
    within = jnp.arange(size, dtype=jnp.int32)

    def own(i, carry):
        key = i * size + within
        # the mask is needed for V, too: padding may be NaN, and a weight of 0 times NaN is NaN
        k, v = (rows_at(ref, key, key < length, head_dim) for ref in (k_ref, v_ref))
        return _step(q, (k, None), (v, None), key < length, carry)

    def old(i, carry):
        # int8 keys and values are converted without their scales, which stay float32: both products
        # keep the type of the own keys and nothing is rounded twice
        (k, v), owned = stored.read(refs, i * size + within, (k_ref.dtype, v_ref.dtype))
        return _step(q, k, v, owned, carry)

    queries = q.shape[0]
    # -inf cannot meet -inf in `_step` (which would be NaN): step 0 of `own` holds token 0, which is
    # always real, and from then on the maximum is finite, also in steps where nothing is owned.
    carry = (
        jnp.full((queries,), -jnp.inf, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        jnp.zeros((queries, head_dim), jnp.float32),
    )
    carry = jax.lax.fori_loop(0, pl.cdiv(length, size), own, carry)
    # the trip count is data: a head that owns nothing makes no step at all
    return jax.lax.fori_loop(0, pl.cdiv(stored.used(refs), size), old, carry)


def _step(q, k, v, mask, carry):
    """One step of the softmax; the maximum is in units of log2."""
    (k, k_scale), (v, v_scale), (maximum, total, sums) = k, v, carry
    scores = dot(q, k, transposed=True)
    if k_scale is not None:
        scores *= k_scale[None]  # one per key, so it may leave the sum over H
    # Masked keys are rows of zeros, whose score of 0 would count; -inf has the weight 0 exactly.
    scores = jnp.where(mask[None], scores, -jnp.inf)
    # The hardware's exponential is exp2; log2(e) joins the subtraction in one multiply-add.
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1) * LOG2_E)
    weights = jnp.exp2(scores * LOG2_E - new_maximum[:, None])
    rescale = jnp.exp2(maximum - new_maximum)  # 0 in the first step: nothing was summed before it
    total = total * rescale + jnp.sum(weights, axis=1)
    if v_scale is not None:  # only after `total`, which sums the weights alone
        weights *= v_scale[None]
    sums = sums * rescale[:, None] + dot(weights.astype(v.dtype), v)
    return new_maximum, total, sums


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
    triton_pool.check(q, kv_pool, kv_scale, interpret)
    call = tiles.Call.of("attention_moments", projection, kv_pool, table)
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
    found = triton_pool.attention_call(
        partial(_sum_columns, stored, config, old),
        *(stored, config, new_length),
        [
            (q, head_spec(queries, head_dim)),
            (k_new, head_spec(own, head_dim)),
            (weights.astype(jnp.float32), triton_pool.line_spec(queries)),
            (lse, head_spec(queries)),
        ],
        [sums] * moments,
        tiles=pl.cdiv(old, config.block_k) + pl.cdiv(own, config.block_k),
        cost=(columns * queries * (2 * head_dim + 2 * moments), columns * queries, moved),
        interpret=interpret,
        name="attention_moments",
    )
    return found[0], found[1] if squares else None


def _sum_columns(stored: Stored, config, old: int, length_ref, given, refs, out_refs):
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
    last = triton_pool.last_true(
        lambda i, inside: triton_pool.load(weight_ref, i, inside) != 0, queries
    )
    # columns without any key make no step, but are written: the result is 0 there, not unspecified
    keys = jnp.max((owned | new).astype(jnp.int32))
    steps = jnp.where(keys > 0, pl.cdiv(last, config.block_q), 0)
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
    weight, lse = (triton_pool.load(ref, query, inside) for ref in (weight_ref, lse_ref))
    # keys are rows here, so that the sum over queries runs within a row
    q = rows_at(q_ref, query, inside, q_ref.shape[1]).astype(k.dtype)
    scores = dot(k, q, transposed=True) * factor
    p = jnp.exp2(scores - (lse * LOG2_E)[None])
    p = jnp.where((weight != 0)[None], p, 0)  # padded queries may be NaN, and 0 * NaN is NaN
    found = [p * weight[None]]
    if len(sums) == 2:
        found.append(p * found[0])  # p squared, weighted once
    return tuple(a + jnp.sum(b, axis=1) for a, b in zip(sums, found, strict=True))
