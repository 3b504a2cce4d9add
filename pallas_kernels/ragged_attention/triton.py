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
from pallas_kernels.ragged_attention.table import BlockTable
from pallas_kernels.ragged_attention.triton_moments import attention_moments
from pallas_kernels.ragged_attention.triton_pool import (
    LOG2_E,
    Stored,
    check,
    compiler_params,
    dot,
    rows_at,
)

__all__ = ["attend", "attention_moments"]


def attend(
    q,
    k_new,
    v_new,
    new_length,
    kv_pool,
    table: BlockTable,
    kv_scale=None,
    *,
    return_lse: bool,
    interpret: bool = False,
    config: tiles.TritonConfig | None = None,
):
    """See `api.attend`. config: tiles; None takes those of `config.choose`."""
    check(q, kv_pool, kv_scale, interpret)
    config = config or tiles.choose(tiles.Call.of("attend", q, k_new, kv_pool, table), "triton")
    stored = Stored.of(kv_pool, table, kv_scale)
    rows, heads, tokens, head_dim = q.shape
    tile = pl.BlockSpec((None, None, config.block_q, head_dim), lambda i, n, r: (r, n, i, 0))
    own = pl.BlockSpec((None, None, tokens, head_dim), lambda i, n, r: (r, n, 0, 0))
    line = pl.BlockSpec((None, None, config.block_q), lambda i, n, r: (r, n, i))
    out = jax.ShapeDtypeStruct(q.shape, v_new.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    found = pl.pallas_call(
        partial(_kernel, stored, config, tokens),
        grid=(pl.cdiv(tokens, config.block_q), heads, rows),
        in_specs=[pl.BlockSpec((1,), lambda i, n, r: (0,)), tile, own, own, *stored.specs],
        out_specs=(tile, line) if return_lse else (tile,),
        out_shape=(out, lse) if return_lse else (out,),
        compiler_params=compiler_params(config),
        cost_estimate=_cost(q, v_new, stored),
        interpret=interpret,
        name="ragged_attention",
    )(new_length.reshape(1).astype(jnp.int32), q, k_new, v_new, *stored.arrays)
    return found if return_lse else found[0]


def _kernel(stored: Stored, config, tokens: int, length_ref, q_ref, k_ref, v_ref, *refs):
    refs, out_refs = refs[: len(stored.arrays)], refs[len(stored.arrays) :]
    length, first = length_ref[0], pl.program_id(0) * config.block_q
    query = first + jnp.arange(config.block_q, dtype=jnp.int32)

    def write(out, *lse):
        plgpu.store(out_refs[0], out.astype(out_refs[0].dtype), mask=(query < tokens)[:, None])
        for ref, value in zip(out_refs[1:], lse, strict=False):
            plgpu.store(ref, value, mask=query < tokens)

    @pl.when(first < length)
    def _():
        q = plgpu.load(q_ref, mask=(query < length)[:, None], other=0).astype(k_ref.dtype)
        top, total, sums = _walk(stored, config, q, length, k_ref, v_ref, refs)
        write(sums / total[:, None], top / LOG2_E + jnp.log(total))

    @pl.when(first >= length)
    def _():
        write(jnp.zeros(q_ref.shape, jnp.float32), jnp.zeros(query.shape, jnp.float32))


def _walk(stored: Stored, config, q, length, k_ref, v_ref, refs):
    """(maximum, sum of weights, weighted sum of values) of a query tile over all its keys."""
    size, head_dim = config.block_k, stored.head_dim
    within = jnp.arange(size, dtype=jnp.int32)

    def own(i, carry):
        key = i * size + within
        k, v = (rows_at(ref, key, key < length, head_dim) for ref in (k_ref, v_ref))
        return _step(q, (k, None), (v, None), key < length, carry)

    def old(i, carry):
        (k, v), owned = stored.read(refs, i * size + within, (k_ref.dtype, v_ref.dtype))
        return _step(q, k, v, owned, carry)

    queries = q.shape[0]
    carry = (
        jnp.full((queries,), -jnp.inf, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        jnp.zeros((queries, head_dim), jnp.float32),
    )
    carry = jax.lax.fori_loop(0, pl.cdiv(length, size), own, carry)
    return jax.lax.fori_loop(0, pl.cdiv(stored.used(refs), size), old, carry)


def _step(q, k, v, mask, carry):
    """One step of the softmax; the maximum is in units of log2."""
    (k, k_scale), (v, v_scale), (top, total, sums) = k, v, carry
    scores = dot(q, k, transposed=True)
    if k_scale is not None:
        scores *= k_scale[None]
    scores = jnp.where(mask[None], scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1) * LOG2_E)
    weights = jnp.exp2(scores * LOG2_E - new_top[:, None])
    decay = jnp.exp2(top - new_top)
    total = total * decay + jnp.sum(weights, axis=1)
    if v_scale is not None:
        weights *= v_scale[None]
    sums = sums * decay[:, None] + dot(weights.astype(v.dtype), v)
    return new_top, total, sums


def _cost(q, v_new, stored: Stored) -> pl.CostEstimate:
    """Upper bound: every token real, every slot owned, keys read once."""
    rows, heads, tokens, head_dim = q.shape
    pairs = rows * heads * tokens * (tokens + stored.keys)
    moved = 2 * q.size * q.dtype.itemsize + 2 * v_new.size * v_new.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * pairs * head_dim, transcendentals=pairs, bytes_accessed=moved + stored.bytes
    )
