"""Storing keys and values in the pool from where they are finished, on Hopper and Blackwell GPUs.

The kernel that finishes a tile (`mosaic_projection`) copies it from shared memory to the slots that
its tokens get, besides the array that attention reads own keys from. Each warp takes some runs of
`RUN` tokens. A run whose slots follow one another is one copy of keys and one of values; of others
every token is copied alone. So storing reads nothing but the table, and takes no kernel of its own.
Rows of a tile lie one behind another, as single ones can then be copied.

Attention runs afterwards. None of the slots that it reads may be among those that are stored.
"""

from dataclasses import dataclass
from functools import partial

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import mosaic_operands as mosaic
from pallas_kernels.mosaic_products import ROWS
from pallas_kernels.refs import Operand, Ref
from pallas_kernels.tables import CONSECUTIVE, KIND_BITS, PARTIAL, RUN, BlockWrites

HALVES = range(2)  # key and value
WARPS = 4  # of a warpgroup


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stores:
    """The pool and what is stored in it, as operands of a kernel, and inside it as references.

    pool: [R, slots, 2 H], changed in place; `jax.freeze` of it is the array afterwards.
    table: `BlockWrites.by_token`, with an axis of layers in front.
    layer: int32 [1], place in that axis.
    """

    pool: Operand
    table: Operand
    layer: Operand

    @classmethod
    def of(cls, kv_pool: Array, writes: BlockWrites) -> "Stores":
        pool = jax.new_ref(kv_pool.reshape(len(kv_pool), -1, kv_pool.shape[-1]))
        table = writes.by_token if writes.by_token.ndim == 3 else writes.by_token[None]
        return cls(pool, table, mosaic.number(writes.layer))

    def _slot(self, head, token):
        """The slot of a token, or -1."""
        runs = self.table.shape[-1] // (RUN + 1)
        return self.table[self.layer[0], head, runs + token]

    def put(self, results: Ref, row, head, first) -> None:
        """Copy finished keys and values, [2, 64, H] in shared memory, of tokens from `first` on."""

        def copy(token, slot, count: int) -> None:
            """Start copying `count` tokens of the tile to slots from `slot` on."""
            head_dim = results.shape[-1]
            for half in HALVES:
                here = results.at[half, pl.ds(token, count)]
                columns = pl.ds(half * head_dim, head_dim)
                plgpu.copy_smem_to_gmem(here, self.pool.at[row, pl.ds(slot, count), columns])

        def put_run(run) -> None:
            word = self.table[self.layer[0], head, jax.lax.div(first, RUN) + run]
            kind = word & (1 << KIND_BITS) - 1
            pl.when(kind == CONSECUTIVE)(lambda: copy(run * RUN, word >> KIND_BITS, RUN))

            @pl.when(kind == PARTIAL)
            def _():
                for i in range(RUN):
                    token = run * RUN + i
                    slot = self._slot(head, first + token)
                    pl.when(slot >= 0)(partial(copy, token, slot, 1))

        @plgpu.warp_map
        def _(warp):
            for turn in range(ROWS // RUN // WARPS):
                put_run(turn * WARPS + warp)
            plgpu.wait_smem_to_gmem(0)  # of this warp: each waits for its own

    def put_rows(self, results: Ref, head, first) -> None:
        """Copy the only token of rows from `first` on. All rows have it in the same slot."""
        head_dim, slot = results.shape[-1], self._slot(head, 0)

        @pl.when(slot >= 0)
        def _():
            for half in HALVES:
                columns = pl.ds(half * head_dim, head_dim)
                place = self.pool.at[pl.ds(first, ROWS), slot, columns]
                plgpu.copy_smem_to_gmem(results.at[half], place)
