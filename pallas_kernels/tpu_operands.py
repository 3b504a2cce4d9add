"""Operands of the TPU kernels: tables in scalar memory, pools that stay in HBM, a scale's own
tokens in vector memory."""

from collections.abc import Sequence
from itertools import islice

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

LANES = 128  # of a vector register; the last axis of an array in vector memory is padded to them


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def balanced(total: int, most: int, multiple: int) -> int:
    """The size, a multiple of `multiple` and about `most` at most, that cuts `total` evenly."""
    # 576 by 512 in steps of 128: two pieces of 384 rather than one of 512 and one nearly empty
    return rounded(-(-total // -(-total // most)), multiple)


def in_parts(refs: Sequence, *counts: int) -> list[list]:
    """Refs cut into lists of these lengths, which are all of them."""
    left = iter(refs)
    found = [list(islice(left, count)) for count in counts]
    assert sum(counts) == len(refs)
    return found


def table_spec(table: Array) -> pl.BlockSpec:
    """One row of tables [1 or R, N, 1, W] for grid step (r, n, ...)."""
    shared = table.shape[0] == 1
    # One row per grid step: scalar memory is 1 MiB in all, too little for all tables prefetched at
    # once. The axis of 1 is there because the last two axes of a block are multiples of (8, 128) or
    # whole.
    return pl.BlockSpec(
        (1, 1, 1, table.shape[-1]),
        lambda r, n, *_: (0 if shared else r, n, 0, 0),
        memory_space=pltpu.SMEM,
    )


def pools(kv_pool: Array, kv_scale: Array | None, interpret: bool) -> list[Array]:
    """The pool and, if there are any, its scales.

    They are kept out of vector memory: XLA would move a pool there that fits, all of it in every
    layer, although the kernel reads a small part. Only a program being traced can do so.
    """
    found = [kv_pool] if kv_scale is None else [kv_pool, kv_scale]
    if interpret or not isinstance(kv_pool, jax.core.Tracer):
        return found
    return [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in found]


def block_shape(pool) -> tuple[int, int]:
    """Of a block [block_size, 2 H] of the pool [R, blocks, block_size, 2 H], or of its scales [1, 2
    block_size] in [R, blocks, 2 block_size]."""
    return pool.shape[2:] if len(pool.shape) == 4 else (1, pool.shape[2])


def block_of(pool, row, block):
    """That block, to be copied. Scales are copied out of their array as it is: any other view of it
    would be laid out in another way, and XLA would copy all scales in every layer."""
    return pool.at[row, block] if len(pool.shape) == 4 else pool.at[row, pl.ds(block, 1)]


def pool_specs(pools: list[Array]) -> list[pl.BlockSpec]:
    # left where they are, without Pallas' pipeline: the kernel copies the blocks that it needs
    return [pl.BlockSpec(memory_space=pl.ANY) for _ in pools]


def packed_tokens(k: Array, v: Array) -> list[Array]:
    """K and V of the scale as kernels take them: together where one alone would be padded to 128
    lanes. XLA joins them in the operation that computes them."""
    return [k, v] if k.shape[-1] % LANES == 0 else [jnp.concatenate([k, v], axis=-1)]


def whole_head(array: Array, tokens: int) -> pl.BlockSpec:
    """All tokens of a head, with room for `tokens`; what lies past the array's is undefined."""
    # the index does not name the tile of queries, so that a head is fetched once for all its tiles
    return pl.BlockSpec((1, 1, tokens, array.shape[-1]), lambda r, n, *_: (r, n, 0, 0))
