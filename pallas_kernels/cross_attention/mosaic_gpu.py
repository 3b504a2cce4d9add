"""Attention over a text on Hopper and Blackwell. The kernel is that of the cache
(`ragged_attention.mosaic_gpu`), in a call where every query sees stored slots only."""

import jax.numpy as jnp

from pallas_kernels.projection import Projection
from pallas_kernels.ragged_attention import mosaic_gpu
from pallas_kernels.tables import BlockTable


def attend_text(q, text, layer, *, interpret):
    """See `api.attend_text`."""
    heads, size = q.shape[2:]
    projection = Projection(q[:, :, None], scale=size**-0.5)
    table = text_table(text, layer, heads)
    # length 0: there are no own keys
    return mosaic_gpu.attend(
        projection, 0, text.kv_pool, table, None, return_lse=False, interpret=interpret
    )


def text_table(text, layer, heads: int) -> BlockTable:
    """The table [R, N, M] of a layer's blocks, valid as far as each row's text goes."""
    rows, blocks, block, _ = text.kv_pool.shape
    each = blocks // (text.layers * heads)  # blocks lie layer by layer, head by head
    first = jnp.arange(each, dtype=jnp.int32)
    ids = first + each * (jnp.arange(heads, dtype=jnp.int32)[:, None] + layer * heads)
    stop = jnp.clip(text.length[:, None, None] - block * first, 0, block).astype(jnp.int32)
    ids, stop = (jnp.broadcast_to(a, (rows, heads, each)) for a in (ids, stop))
    return BlockTable(ids, jnp.zeros_like(ids), stop)
