"""Ragged attention on NVIDIA GPUs with Pallas-Triton. See `api` for what it computes.

Tiling. One program serves `block_q` queries of one head of one row: it holds the query tile, the
float32 accumulator and the running maximum and sum, and walks over keys in steps of `block_k`: own
keys first, then the head's table. Own keys are at least one, so the maximum is finite from the
first step on, and empty heads need no case of their own. (Full steps of own keys without a mask,
and a last one with it, cost more shared memory than they save.)

Stored keys are numbered through the table, so a step joins as many blocks as it needs, for any
block size, and a program stops after the last entry that its head uses. Loads are masked with the
entry's range: invalid slots cost no traffic, and what they hold (NaN) never meets arithmetic. Tiles
of padded queries only write zeros.

Traffic, with b bytes per element, t real tokens and P' valid slots of a head: the tiles of a head
run side by side, so that its keys come from the L2 cache after the first. From memory then
R N H b (3 t + 2 P') in and R N H b T out; from the cache R N H b 2 (t + P') ceil(t / block_q).
Tables: 8 M bytes per program, and 12 per key of a step, from the cache.

Arithmetic. Scores are products in the type of `k_new` with float32 sums; exponentials are powers of
two of scores times log2(e), float32; weights are rounded to the type of `v_new` before the second
product. int8 keys and values are exact in bfloat16; their scales multiply scores and weights.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.ragged_attention.triton_moments import attention_moments
from pallas_kernels.ragged_attention.triton_pool import (
    LOG2_E,
    Stored,
    attention_call,
    check,
    dot,
    head_spec,
    rows_at,
)

__all__ = ["attend", "attention_moments"]


def attend(
    q,
    k_new,
    v_new,
    new_length,
    kv_pool,
    table,
    kv_scale=None,
    *,
    return_lse,
    interpret,
    config=None,
):
    """See `api.attend`. config: tiles; None takes those of `config.choose`."""
    check(q, kv_pool, kv_scale, interpret)
    config = config or tiles.choose(tiles.Call.of("attend", q, k_new, kv_pool, table), "triton")
    stored = Stored.of(kv_pool, table, kv_scale)
    rows, heads, tokens, head_dim = q.shape
    tile = pl.BlockSpec((None, None, config.block_q, head_dim), lambda i, n, r: (r, n, i, 0))
    line = pl.BlockSpec((None, None, config.block_q), lambda i, n, r: (r, n, i))
    own, pairs = head_spec(tokens, head_dim), rows * heads * tokens * (tokens + stored.keys)
    lse = (jax.ShapeDtypeStruct(q.shape[:3], jnp.float32), line)
    found = attention_call(
        partial(_kernel, stored, config, tokens),
        *(stored, config, new_length),
        [(q, tile), (k_new, own), (v_new, own)],
        [(jax.ShapeDtypeStruct(q.shape, v_new.dtype), tile)] + [lse] * return_lse,
        tiles=pl.cdiv(tokens, config.block_q),
        cost=(4 * pairs * head_dim, pairs, 2 * q.size * (q.dtype.itemsize + v_new.dtype.itemsize)),
        interpret=interpret,
        name="ragged_attention",
    )
    return found if return_lse else found[0]


def _kernel(stored: Stored, config, tokens: int, length_ref, given, refs, out_refs):
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
