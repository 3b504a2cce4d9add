"""Which slots of the pool a head may read."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

AnyArray = Array | np.ndarray  # the planner's tables are made on the host


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTable:
    """Runs of slots: entry m of head n covers slots [start, stop) of block `ids`. start == stop is
    an empty entry.

    Arrays are int32 [N, M] (all rows alike) or [R, N, M] (per row). Ids are global in the row's
    pool and always valid, also in empty entries. A block may be listed twice with disjoint ranges.
    """

    # Valid also where empty: the reference gathers every entry, and the TPU kernels copy the blocks
    # of all entries up to the last one in use.
    ids: Int[AnyArray, "*rows N M"]
    start: Int[AnyArray, "*rows N M"]
    stop: Int[AnyArray, "*rows N M"]

    def _offsets(self, block_size: int) -> Int[Array, "*rows N M block_size"]:
        """Place within the block of every slot of every entry."""
        shape = (*self.ids.shape, block_size)
        return jax.lax.broadcasted_iota(self.ids.dtype, shape, self.ids.ndim)

    def with_rows(self) -> tuple[Array, Array, Array]:
        """(ids, start, stop), each [R, N, M], or [1, N, M] if the table is shared by all rows."""
        return tuple(a if a.ndim == 3 else a[None] for a in (self.ids, self.start, self.stop))

    def slot_mask(self, block_size: int) -> Bool[Array, "*rows N P"]:
        """Valid slots in table order; P = M * block_size."""
        offset = self._offsets(block_size)
        mask = (offset >= self.start[..., None]) & (offset < self.stop[..., None])
        return mask.reshape(*self.ids.shape[:-1], -1)

    def slots(self, block_size: int) -> Int[Array, "*rows N P"]:
        """Slot numbers (block id * block_size + offset) in table order, valid or not."""
        offset = self._offsets(block_size)
        return (self.ids[..., None] * block_size + offset).reshape(*self.ids.shape[:-1], -1)

    def for_rows(self, regions: Int[Array, "R N"]) -> "BlockTable":
        """Per-row tables where head n of row r reads the entries listed for region `regions[r,
        n]`."""
        return jax.tree.map(lambda a: a[regions], self)

    def filled_to(self, count: Int[Array, "*rows N"], block_size: int) -> "BlockTable":
        """The same blocks, valid for the first `count` slots in table order."""
        first = (
            jax.lax.broadcasted_iota(self.ids.dtype, self.ids.shape, self.ids.ndim - 1) * block_size
        )
        # negative behind the last block in use, where nothing is valid: clipped to an empty entry
        stop = jax.numpy.clip(count[..., None] - first, 0, block_size)
        return BlockTable(self.ids, jax.numpy.zeros_like(self.start), stop.astype(self.stop.dtype))
