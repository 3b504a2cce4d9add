"""Storing tokens in the pool on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend.

See `api.write`.

Tiling. A program serves one entry of one head of one row: it copies the entry's tokens into shared
memory, key and value of a slot side by side, and from there to the slots that receive one; nothing
passes through registers. A block that takes a run of tokens, which most do, is three copies; else
each slot is three. Slots that stay as they are, and empty entries, are not touched.

Traffic: every stored token once in and once out, 4 R N T H b bytes for T stored tokens of H
elements of b bytes; tables of 4 (block_size + 2) bytes per entry.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_operands as mosaic
from pallas_kernels.cache_write import reference

EMPTY, SOME, RUN = range(
    3
)  # kinds of entries: no token, any tokens, a whole block of consecutive ones


def write(kv_pool, k, v, writes, kv_scale, *, interpret):
    """See `api.write`."""
    mosaic.check(k, kv_pool, kv_scale, interpret)
    if not kv_pool.size or not writes.source.size:
        return kv_pool, kv_scale  # there is no slot to fill
    if kv_scale is not None:
        # XLA's scatter, in place as well: scales are numbers of 4 bytes at places of their own, and
        # a copy moves 16 at least
        return reference.write(kv_pool, k, v, writes, kv_scale)
    size, head_dim = kv_pool.shape[2], k.shape[-1]
    # copies change no type, and a run is as long as a block
    k, v = (mosaic.padded(a.astype(kv_pool.dtype), 2, 8, size) for a in (k, v))
    ids, source = (a if writes.ids.ndim == 3 else a[None] for a in (writes.ids, writes.source))
    run = (source == source[..., :1] + jnp.arange(size, dtype=source.dtype)).all(-1)
    kind = jnp.where(
        (source >= 0).any(-1), jnp.where(run & (source[..., 0] >= 0), RUN, SOME), EMPTY
    )
    pool = mosaic.update(
        partial(_store, len(ids) > 1, head_dim),
        kv_pool,
        [ids, kind.astype(jnp.int32), source, k, v],
        [
            plgpu.SMEM((2, size, head_dim), kv_pool.dtype),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2 * size),
        ],
        grid={"entry": ids.shape[-1], "head": k.shape[1], "row": k.shape[0]},
        interpret=interpret,
        name="cache_write",
    )
    return pool, kv_scale


def _store(per_row: bool, head_dim: int, pool, ids, kinds, source, k_ref, v_ref, tokens, *barriers):
    row, head, entry = (jax.lax.axis_index(name) for name in ("row", "head", "entry"))
    where = (row if per_row else 0, head, entry)
    block, kind, size = ids[where], kinds[where], tokens.shape[1]
    whole, single = barriers
    halves = [(ref.at[row, head], i) for i, ref in enumerate((k_ref, v_ref))]

    def columns(half: int):
        return pl.ds(half * head_dim, head_dim)

    @pl.when(kind == RUN)
    def _():
        first = source[(*where, 0)]
        for ref, half in halves:
            plgpu.copy_gmem_to_smem(ref.at[pl.ds(first, size)], tokens.at[half], whole)
        plgpu.barrier_wait(whole)
        for _, half in halves:
            plgpu.copy_smem_to_gmem(tokens.at[half], pool.at[row, block, :, columns(half)])

    @pl.when(kind == SOME)
    def _():
        for i in range(size):
            # slots without a token take any: a barrier counts as many copies every time
            token = jnp.maximum(source[(*where, i)], 0)
            for ref, half in halves:
                plgpu.copy_gmem_to_smem(ref.at[token], tokens.at[half, i], single)
        plgpu.barrier_wait(single)
        for i in range(size):

            @pl.when(source[(*where, i)] >= 0)
            def _(i=i):
                for _, half in halves:
                    plgpu.copy_smem_to_gmem(
                        tokens.at[half, i], pool.at[row, block, i, columns(half)]
                    )

    plgpu.wait_smem_to_gmem(0)
