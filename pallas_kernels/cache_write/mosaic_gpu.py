"""Storing tokens in the pool on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend.

See `api.write`.

Tiling. A program serves one entry of one head of one row: it copies the entry's tokens, finished
(`mosaic_projection.finished`), into shared memory, key and value of a slot side by side, and from
there to the slots that receive one; nothing passes through registers. A block that takes a run of
tokens, which most do, is three copies; else each slot is three. Slots that stay as they are, and
empty entries, are not touched.

Traffic: every stored token once in and once out, 4 R N T H b bytes for T stored tokens of H
elements of b bytes; tables of 4 (block_size + 2) bytes per entry.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import estimates
from pallas_kernels import mosaic_operands as mosaic
from pallas_kernels.cache_write import reference
from pallas_kernels.mosaic_projection import finished
from pallas_kernels.projection import K, V
from pallas_kernels.tables import CONSECUTIVE, FULL, KIND_BITS, PARTIAL


def write(kv_pool, projection, writes, kv_scale, *, interpret):
    """See `api.write`."""
    mosaic.check(projection.qkv, kv_pool, kv_scale, interpret)
    if not kv_pool.size or not writes.source.size:
        return kv_pool, kv_scale  # there is no slot to fill
    if kv_scale is not None:
        # XLA's scatter, in place as well: scales are numbers of 4 bytes at places of their own, and
        # a copy moves 16 at least
        return reference.write(kv_pool, projection, writes, kv_scale)
    (rows, heads, _, head_dim), size = projection.shape, kv_pool.shape[2]
    tokens = finished(projection, (K, V), interpret).astype(kv_pool.dtype)
    table, per_row = mosaic.packed(writes)
    pool = mosaic.update(
        partial(_store, per_row, writes.ids.shape[-1], head_dim),
        kv_pool,
        [mosaic.number(writes.layer), table, tokens],
        [
            plgpu.SMEM((2, size, head_dim), kv_pool.dtype),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2 * size),
        ],
        grid={"entry": writes.ids.shape[-1], "head": heads, "row": rows},
        cost=estimates.write(projection, kv_pool, writes),
        interpret=interpret,
        name="cache_write",
    )
    return pool, kv_scale


def _store(
    per_row: bool, entries: int, head_dim: int, pool, layer, table, given, tokens, *barriers
):
    row, head, entry = (jax.lax.axis_index(name) for name in ("row", "head", "entry"))
    lead, size, heads = row if per_row else layer[0], tokens.shape[1], table.shape[1]
    packed = table[lead, head, 0, entry]
    block, kind = packed >> KIND_BITS, packed & (1 << KIND_BITS) - 1
    (whole, single), halves = barriers, range(2)

    def source(slot: int):
        return table[lead, head, 0, entries + 2 + entry * size + slot]

    def of_head(half: int):
        return pl.ds((half * heads + head) * head_dim, head_dim)

    def columns(half: int):
        return pl.ds(half * head_dim, head_dim)

    @pl.when(kind == CONSECUTIVE)
    def _():
        first = source(0)
        for half in halves:
            run = given.at[row, pl.ds(first, size), of_head(half)]
            plgpu.copy_gmem_to_smem(run, tokens.at[half], whole)
        plgpu.barrier_wait(whole)
        for half in halves:
            plgpu.copy_smem_to_gmem(tokens.at[half], pool.at[row, block, :, columns(half)])

    @pl.when((kind == PARTIAL) | (kind == FULL))
    def _():
        for i in range(size):
            # slots without a token take any: a barrier counts as many copies every time
            token = jnp.maximum(source(i), 0)
            for half in halves:
                one = given.at[row, token, of_head(half)]
                plgpu.copy_gmem_to_smem(one, tokens.at[half, i], single)
        plgpu.barrier_wait(single)
        for i in range(size):

            @pl.when(source(i) >= 0)
            def _(i=i):
                for half in halves:
                    target = pool.at[row, block, i, columns(half)]
                    plgpu.copy_smem_to_gmem(tokens.at[half, i], target)

    plgpu.wait_smem_to_gmem(0)
