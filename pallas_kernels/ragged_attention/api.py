"""Ragged attention: signatures, documentation and dispatch.

A call serves one layer of one scale. Every query sees all keys of its own scale, which are passed
in and not stored yet, and the stored slots that its head owns. One flat pool holds all layers and
heads, so the layer is data, and raggedness is in the table, never in a shape.
"""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import implementations
from pallas_kernels.projection import Projection
from pallas_kernels.tables import BlockTable, BlockWrites

MODULES = implementations.modules_of(__package__)
ArrayOrShape = Array | jax.ShapeDtypeStruct  # programs are compiled ahead of time from shapes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuerySums:
    """Sums over queries that `attention_moments` takes.

    weights: float32, what each query's attention is multiplied by; zero for padded queries.
    lse: what `attend(..., return_lse=True)` returned for these queries.
    squares: static, whether squared attention weights are summed, too.
    """

    weights: Float[ArrayOrShape, " T"]
    lse: Float[ArrayOrShape, "R N T"]
    squares: bool = field(default=False, metadata=dict(static=True))


def attend(
    projection: Projection,
    new_length: Int[Array, ""] | int,
    kv_pool: Num[Array, "R blocks block_size KV"],
    table: BlockTable,
    *,
    kv_scale: Float[Array, "R blocks two_block_size"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "R T N H"] | tuple[Float[Array, "R T N H"], Float[Array, "R N T"]]:
    """Attention of a scale's queries over its own keys and the stored slots of `table`.

    Args:
      projection: queries, keys and values of the scale. Tokens past `new_length` are padding. The
        result of padded queries is unspecified, but finite if the queries are; padded keys and
        values are masked.
      new_length: number of real tokens of the scale (traced), at least 1.
      kv_pool: finished K in the first half of the last axis, V in the second (KV = 2 H). Unlisted
        slots may hold anything, NaN included (unless `table.finite`).
      table: slots per head, shared by all rows or per row.
      kv_scale: factors of the numbers of an int8 pool: for each block, block_size scales of keys,
        then as many of values.
      return_lse: also return the logarithm of the sum of the exponentials of each query's scores.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform.

    Returns:
      Attention output in the type of the projection; softmax statistics are float32. With
      `return_lse` a pair, the second part float32 (natural logarithm).

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    # in the order of the implementations, which take no defaults
    arguments = (projection, new_length, kv_pool, table, kv_scale)
    return implementations.run(implementation, MODULES, "attend", *arguments, return_lse=return_lse)


def store_and_attend(
    projection: Projection,
    new_length: Int[Array, ""] | int,
    kv_pool: Num[Array, "R blocks block_size KV"],
    table: BlockTable,
    writes: BlockWrites,
    *,
    kv_scale: Float[Array, "R blocks two_block_size"] | None = None,
    following: BlockTable | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "R T N H"], Array, Array | None]:
    """`attend` and `cache_write.write` of the same scale, where none of the slots that `table`
    lists is among those that `writes` fills. So the order does not matter, and a kernel may store
    keys and values while it finishes them.

    Args:
      writes: which token goes into which slot. The other arguments are those of `attend`.
      following: the slots of `table` and those of all of the scale's tokens, if `writes` stores all
        of them, or None. A kernel that has stored them may read them there.

    Returns:
      The attention output, the pool and its scales (None unless int8).

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    arguments = (projection, new_length, kv_pool, table, writes, kv_scale, following)
    return implementations.run(implementation, MODULES, "store_and_attend", *arguments)


def attention_moments(
    projection: Projection,
    new_length: Int[Array, ""] | int,
    kv_pool: Num[Array, "R blocks block_size KV"],
    table: BlockTable,
    sums: QuerySums,
    *,
    kv_scale: Float[Array, "R blocks two_block_size"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "R N PT"], Float[Array, "R N PT"] | None]:
    """Attention weights, and on request their squares, summed over queries.

    out[k] = sum_q sums.weights[q] * exp(score[q, k] - sums.lse[q]), columns as in
    `attention_scores`; zero where there is no key. This is a second pass over what the attention
    has loaded. All other arguments mean the same as in `attend`.

    Returns:
      The sums, and those of the squares or None.
    """
    arguments = (projection, new_length, kv_pool, table, sums, kv_scale)
    return implementations.run(implementation, MODULES, "attention_moments", *arguments)
