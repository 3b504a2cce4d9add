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

from collections.abc import Callable
from dataclasses import dataclass
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
from pallas_kernels.refs import Ref, Scalar
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
    pool = mosaic.update(
        partial(_store, per_row, writes.ids.shape[-1]),
        kv_pool,
        [mosaic.number(writes.layer), table, tokens, tokens if after is None else after],
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


def _store(per_row: bool, entries: int, pool, layer, table, given, _, tokens, *barriers):
    row, head, entry = (jax.lax.axis_index(name) for name in ("row", "head", "entry"))
    # the table's first axis is rows or layers
    lead, heads = row if per_row else layer[0], table.shape[1]
    _, size, head_dim = tokens.shape
    packed = table[lead, head, 0, entry]
    block, kind = packed >> KIND_BITS, packed & (1 << KIND_BITS) - 1

    def source(slot: int):
        return table[lead, head, 0, entries + 2 + entry * size + slot]

    def of_head(half: int):
        return pl.ds((half * heads + head) * head_dim, head_dim)

    this = _Entry(given, tokens, pool, row, block, source, of_head)
    # one barrier per kind: each counts another number of copies
    pl.when(kind == CONSECUTIVE)(lambda: this.store_run(barriers[0]))
    pl.when((kind == PARTIAL) | (kind == FULL))(lambda: this.store_slots(barriers[1]))
    plgpu.wait_smem_to_gmem(0)  # shared memory is another program's afterwards


@dataclass(frozen=True)
class _Entry:
    """One entry of a head's table.

    given: finished tokens, [R, T, 2 N H].
    tokens: shared memory [2, block_size, H].
    row, block: the block of the pool that receives tokens.
    source: function from a slot of the block to its token, or -1.
    of_head: function from a half (key or value) to the head's columns of `given`.
    """

    given: Ref
    tokens: Ref
    pool: Ref
    row: Scalar
    block: Scalar
    source: Callable[[int], Scalar]
    of_head: Callable[[int], pl.Slice]

    def store_run(self, barrier) -> None:
        """Store tokens that follow one another."""
        first = self.source(0)
        for half in HALVES:
            run = self.given.at[self.row, pl.ds(first, self.tokens.shape[1]), self.of_head(half)]
            plgpu.copy_gmem_to_smem(run, self.tokens.at[half], barrier)
        plgpu.barrier_wait(barrier)
        for half in HALVES:
            plgpu.copy_smem_to_gmem(self.tokens.at[half], self._target(slice(None), half))

    def store_slots(self, barrier) -> None:
        """Store one token after another."""
        slots = range(self.tokens.shape[1])
        for i in slots:
            # Slots without a token fetch token 0: the barrier always counts the same copies.
            token = jnp.maximum(self.source(i), 0)
            for half in HALVES:
                one = self.given.at[self.row, token, self.of_head(half)]
                plgpu.copy_gmem_to_smem(one, self.tokens.at[half, i], barrier)
        plgpu.barrier_wait(barrier)
        for i in slots:

            @pl.when(self.source(i) >= 0)
            def _(i=i):
                for half in HALVES:
                    plgpu.copy_smem_to_gmem(self.tokens.at[half, i], self._target(i, half))

    def _target(self, slots, half: int):
        """The keys or values of slots of the block."""
        head_dim = self.tokens.shape[2]
        return self.pool.at[self.row, self.block, slots, pl.ds(half * head_dim, head_dim)]
