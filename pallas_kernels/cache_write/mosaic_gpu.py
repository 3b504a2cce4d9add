"""Storing tokens in the pool on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend.

See `api.write`.

Tiling. A program serves one table entry of one head of one row. It copies the entry's finished
tokens (`mosaic_projection.finished`) into shared memory and from there to the slots that receive
one; nothing passes through registers. Most blocks take a run of tokens, whose keys and values are
two copies in and two out. Other blocks take as many copies for each slot. Slots that stay as they
are, and empty entries, are not touched.

Traffic. Every stored token moves once in and once out: 4 R N T H b bytes for T stored tokens of H
elements of b bytes. Tables are 4 (block_size + 2) bytes per entry.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import estimates
from pallas_kernels.cache_write import reference
from pallas_kernels.projection import K, V
from pallas_kernels.refs import one_number
from pallas_kernels.shared import mosaic_operands as mosaic
from pallas_kernels.shared.mosaic_projection import finished
from pallas_kernels.tables import CONSECUTIVE, FULL, KIND_BITS, PARTIAL

HALVES = range(2)  # key and value


def write(kv_pool, projection, writes, kv_scale, *, interpret, after=None):
    """See `api.write`."""
    mosaic.check(projection.qkv, kv_pool, kv_scale, interpret)
    if not kv_pool.size or not writes.source.size:
        return kv_pool, kv_scale  # there is no slot to fill
    if kv_scale is not None:
        # XLA's scatter works in place as well. Copies of this kernel move 16 bytes at least, and a
        # slot's scales are numbers of 4 bytes at places of their own.
        return reference.write(kv_pool, projection, writes, kv_scale, after=after)
    (rows, heads, _, head_dim), size = projection.shape, kv_pool.shape[2]
    tokens = finished(projection, (K, V), interpret).astype(kv_pool.dtype)
    table, per_row = mosaic.packed(writes.with_packed())
    given = one_number(writes.layer), table, tokens, tokens if after is None else after
    pool = jax.new_ref(kv_pool)  # what is not written keeps its contents
    memory = (
        plgpu.SMEM((2, size, head_dim), kv_pool.dtype),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2 * size),
    )
    entries = writes.ids.shape[-1]
    pl.kernel(
        lambda *refs: pl.run_scoped(
            partial(_store, per_row, entries, refs[-1], *refs[:-1]), *memory
        ),
        out_type=(),
        mesh=plgpu.Mesh(grid=(entries, heads, rows), grid_names=("entry", "head", "row")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=mosaic.LANES),
        cost_estimate=estimates.write(projection, kv_pool, writes),
        interpret=mosaic.simulator(interpret),
        name="cache_write",
    )(*given, pool)
    return jax.freeze(pool), kv_scale


def _store(per_row: bool, entries: int, pool, layer, table, given, _, memory, *barriers):
    row, head, entry = (jax.lax.axis_index(name) for name in ("row", "head", "entry"))
    # the table's first axis is rows or layers
    lead, heads = row if per_row else layer[0], table.shape[1]
    _, size, head_dim = memory.shape
    packed = table[lead, head, 0, entry]
    block, kind = packed >> KIND_BITS, packed & (1 << KIND_BITS) - 1

    def source(slot: int):
        """The token that a slot of the block receives, or -1."""
        return table[lead, head, 0, entries + 2 + entry * size + slot]

    def fetch(tokens, half: int, memory, barrier) -> None:
        columns = pl.ds((half * heads + head) * head_dim, head_dim)
        plgpu.copy_gmem_to_smem(given.at[row, tokens, columns], memory, barrier)

    def put(memory, slots, half: int) -> None:
        columns = pl.ds(half * head_dim, head_dim)
        plgpu.copy_smem_to_gmem(memory, pool.at[row, block, slots, columns])

    # one barrier per kind: each counts another number of copies
    @pl.when(kind == CONSECUTIVE)
    def _():
        first = source(0)
        for half in HALVES:
            fetch(pl.ds(first, size), half, memory.at[half], barriers[0])
        plgpu.barrier_wait(barriers[0])
        for half in HALVES:
            put(memory.at[half], slice(None), half)

    @pl.when((kind == PARTIAL) | (kind == FULL))
    def _():
        for i in range(size):
            # Slots without a token fetch token 0: the barrier always counts the same copies.
            token = jnp.maximum(source(i), 0)
            for half in HALVES:
                fetch(token, half, memory.at[half, i], barriers[1])
        plgpu.barrier_wait(barriers[1])
        for i in range(size):

            @pl.when(source(i) >= 0)
            def _(i=i):
                for half in HALVES:
                    put(memory.at[half, i], i, half)

    plgpu.wait_smem_to_gmem(0)  # shared memory is another program's afterwards
