"""Operands of the TPU kernels: tables are in scalar memory, pools stay in HBM."""

from collections.abc import Sequence
from itertools import islice

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

BLOCK_SIZES = (8, 16, 32, 64, 128)  # slots of a block that the kernels take
# of a pool that is left where it is, without Pallas' pipeline: kernels copy the blocks they need
IN_PLACE = pl.BlockSpec(memory_space=pl.ANY)
LANES = 128  # of a vector register; in vector memory the last axis of an array is padded to them


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def balanced(total: int, most: int, multiple: int) -> int:
    """The size that cuts `total` evenly, a multiple of `multiple` and about `most` at most."""
    # 576 by 512 in steps of 128: two pieces of 384 rather than one of 512 and one nearly empty
    return rounded(-(-total // -(-total // most)), multiple)


def in_parts(refs: Sequence, *counts: int) -> list[list]:
    """Cut references into lists of these lengths, which add up to all of them."""
    left = iter(refs)
    return [list(islice(left, count)) for count in counts]


def layer_of(table) -> Array:
    """The number of a table's layer, int32 [1], as an operand that is known before the grid."""
    return jnp.reshape(0 if table.layer is None else table.layer, 1).astype(jnp.int32)


def table_rows(table, heads) -> tuple[Array, pl.BlockSpec]:
    """The rows of a packed table, [lead, N, 1, W], where `lead` counts layers or rows or is 1, and
    those of the heads of grid step (r, n, ...). The last operand that is known before the grid is
    the layer. heads: `tpu_projection.HeadGroups`, which says how many heads N is padded to."""
    found = table.packed
    rows = heads.padded(found if found.ndim == 4 else found[None], 1)
    per_row = table.layer is None and rows.shape[0] > 1
    # A row per head: scalar memory is 1 MiB in all, too little for all tables prefetched at once.
    # The axis of 1 is there because the last two axes of a block are multiples of (8, 128) or
    # whole.
    return rows, pl.BlockSpec(
        (1, heads.step, 1, rows.shape[-1]),
        lambda r, n, *rest: (r if per_row else rest[-1][0], n, 0, 0),
        memory_space=pltpu.SMEM,
    )


def pools(kv_pool: Array, kv_scale: Array | None, interpret: bool) -> list[Array]:
    """The pool and, if there are any, its scales.

    They are kept out of vector memory. XLA would move a pool there if it fits, all of it in every
    layer, although the kernel reads a small part. The constraint exists only while a program is
    traced.
    """
    found = [kv_pool] if kv_scale is None else [kv_pool, kv_scale]
    if interpret or not isinstance(kv_pool, jax.core.Tracer):
        return found
    return [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in found]


def block_shape(pool) -> tuple[int, int]:
    """The shape of one block: [block_size, 2 H] of the pool [R, blocks, block_size, 2 H], or [1, 2
    block_size] of its scales [R, blocks, 2 block_size]."""
    return pool.shape[2:] if len(pool.shape) == 4 else (1, pool.shape[2])


def block_of(pool, row, block):
    """A block of the pool or of its scales, to be copied."""
    # Scales are copied out of their array as it is: XLA would lay any other view of it out in
    # another way, and copy all scales in every layer.
    return pool.at[row, block] if len(pool.shape) == 4 else pool.at[row, pl.ds(block, 1)]
