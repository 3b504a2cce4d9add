"""Storing tokens in the pool on NVIDIA GPUs with Pallas-Triton. See `api.write`.

Tiling. One program serves `SLOTS` consecutive slots of one head's list in one row, joined from as
many blocks as that takes. It reads which token goes into each slot, gathers the tokens' keys and
values from the projection, finishes them (norm, rotation, bias; float32, rounded to the type that
attention sees), quantises them for an int8 pool, and stores them where they belong. Loads and
stores are masked with "a token goes here". So slots that stay as they are, and empty entries, cost
only the reading of 4 bytes that name their token. The pool and its scales are aliased: nothing else
is written.

Traffic. Every stored token moves once in its own type and once in the pool's: 2 R N T H (b +
b_pool) bytes for T tokens of H elements that are stored in R rows and N heads. An int8 pool adds 8
R N T of scales. Angles are 8 T H bytes, from the cache for all heads but one. Tables are 4 (J
block_size + J) bytes per head and row.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import estimates
from pallas_kernels.cache_write.reference import LARGEST_INT8, inverse_scale
from pallas_kernels.shared.triton_operands import HeadTables, Tokens, check, row_spec

SLOTS = 64  # per program: of a bfloat16 tile with heads of 64, each of 128 threads holds 64 bytes
WARPS = 4
IDS, SOURCE = range(2)  # of a head's tables


def write(kv_pool, projection, writes, kv_scale, *, interpret: bool, after=None):
    """See `api.write`."""
    check(projection, kv_pool, kv_scale, interpret)
    if not kv_pool.size or not writes.source.size:
        return kv_pool, kv_scale  # there is no slot to fill
    rows, heads, _, head_dim = projection.shape
    block_size, places = kv_pool.shape[2], writes.ids.shape[-1] * kv_pool.shape[2]
    # merging adjacent axes moves no data
    source = writes.source.reshape(*writes.ids.shape[:-1], places)
    tables = HeadTables.of(writes.layer, writes.ids, source)
    stores = [kv_pool.reshape(rows, -1, 2 * head_dim)]
    if kv_scale is not None:
        stores.append(kv_scale.reshape(rows, -1))
    given = tables, Tokens.keys(projection), Tokens.values(projection)
    row_specs = list(map(row_spec, stores))  # stores name the slots, which no two programs share
    unread = [] if after is None else [after]
    before = len(jax.tree.leaves(given)) + len(unread)
    found = pl.pallas_call(
        partial(_kernel, block_size, places, len(unread)),
        grid=(pl.cdiv(places, SLOTS), heads, rows),
        in_specs=[tuple(a.specs for a in given), *[pl.BlockSpec()] * len(unread), *row_specs],
        out_specs=row_specs,
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in stores],
        # Without aliases the results would be new arrays, in which slots without a new token would
        # hold anything.
        input_output_aliases={before + i: i for i in range(len(stores))},
        # one stage: without a loop there is nothing to load ahead
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        cost_estimate=estimates.write(projection, kv_pool, writes),
        interpret=interpret,
        name="cache_write",
    )(given, *unread, *stores)
    scales = found[1].reshape(kv_scale.shape) if kv_scale is not None else None
    return found[0].reshape(kv_pool.shape), scales


def _kernel(block_size: int, places: int, unread: int, given, *refs):
    tables, *tokens = given
    refs = refs[unread:]
    pool_ref, *scale_ref = refs[len(refs) // 2 :]  # results; the same memory as the operands
    place = pl.program_id(0) * SLOTS + jnp.arange(SLOTS, dtype=jnp.int32)
    inside = place < places
    token = tables.load(SOURCE, place, inside, other=-1)
    block = tables.load(IDS, place // block_size, inside)
    stored = token >= 0
    # Entries without tokens may name any block. A masked lane stores nothing on a GPU. In interpret
    # mode it writes the old value back, which could undo the store of another lane, so it is sent
    # to a slot that does not exist.
    block = jnp.where(stored, block, pool_ref.shape[0] // block_size)
    slot = block * block_size + place % block_size
    for half, some in enumerate(tokens):
        # rounded to the type that attention sees, whatever type the pool has
        x = some.finished(token, stored).astype(some.dtype)
        if scale_ref:  # scales of a block: those of all its keys, then those of its values
            x, scale = _quantize(x)
            line = block * (2 * block_size) + half * block_size + place % block_size
            plgpu.store(scale_ref[0].at[line], scale, mask=stored)
        column = half * some.head_dim + jnp.arange(some.head_dim, dtype=jnp.int32)
        where = tuple(jnp.broadcast_to(a, x.shape) for a in (slot[:, None], column))
        plgpu.store(pool_ref.at[where], x.astype(pool_ref.dtype), mask=stored[:, None])


def _quantize(x):
    """`reference.quantize` in operations that a kernel has, with the same bits."""
    x = x.astype(jnp.float32)
    # XLA turns the reference's division by a constant into this product
    scale = jnp.max(jnp.abs(x), axis=1) * np.float32(1 / LARGEST_INT8)
    x *= inverse_scale(scale)[:, None]
    below = jnp.floor(x)  # Pallas-Triton cannot lower jnp.round
    rest, odd = x - below, below - 2 * jnp.floor(below * 0.5)
    up = (rest > 0.5) | ((rest == 0.5) & (odd == 1))  # to nearest, ties to even
    return jnp.where(up, below + 1, below).astype(jnp.int8), scale
