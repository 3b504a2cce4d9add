"""CachePlan: everything about the cache that is decided on the host, before anything is compiled.

The bytes of the pool are computed here and are what XLA allocates. `accounting="bytes"` (default):
block rounding is charged to the budget, so pool bytes <= budget * dense bytes.
`accounting="tokens"`: tokens are counted as the papers do, and the plan says by how much the
rounded pool exceeds the budget.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from varjax import arguments
from varjax.cache import allocator
from varjax.cache.allocation import Allocation, Geometry, RegionAllocation, StaticAllocation
from varjax.cache.observation import Policy, Rule
from varjax.errors import UserError

KV_DTYPES = ("bfloat16", "float32", "int8")  # of stored keys and values


@dataclass(frozen=True, eq=False, kw_only=True)
class CachePlan:
    """What plans of both kinds of models have: the pool and its bytes. Immutable; equal and hashed
    by content. Models that draw scale by scale have a `ScalePlan`, those that draw token by token a
    `varjax.cache.stages.TokenPlan`.

    capacity: int32 [K, L, N], tokens held when scale (or stage) s starts.
    policy: the policy that was planned for, with what its calibration decides filled in.
    """

    geometry: Geometry
    allocation: Any
    block_size: int
    pool_blocks: int
    capacity: np.ndarray
    budget: float
    accounting: str
    policy: Policy | None = None

    @cached_property
    def rule(self) -> Rule | None:
        """What the policy does on this kind of model; None where the plan knows no policy."""
        return None if self.policy is None else self.policy.rule(self.geometry.kind)

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def pool_tokens(self) -> int:
        """Slots of the pool, per row."""
        return self.pool_blocks * self.block_size

    def num_bytes(self, batch_size: int, dtype) -> int:
        """Bytes of the pool for a batch of images (all rows). int8 includes the scales, one float32
        for the key and one for the value of every slot. dtype: of `KV_DTYPES`; `UserError` for
        others, and for a batch that is none."""
        return self.pool_tokens * self._bytes_per_token(batch_size, dtype)

    def dense_bytes(self, batch_size: int, dtype) -> int:
        """Bytes of the full cache (last scale excluded) for a batch of images."""
        return self.geometry.dense_tokens * self._bytes_per_token(batch_size, dtype)

    def check_rows(self, config, sampling) -> int:
        """Cache rows of an image under this sampling: two with guidance. config: of the
        transformer. `UserError` if the model cannot draw that way, or the plan is for another
        number of rows."""
        rows = 2 if config.is_guided(config.check_sampling(sampling)) else 1
        if self.geometry.rows_per_image != rows:
            raise UserError(
                f"the cache plan is for {self.geometry.rows_per_image} rows per image, guidance "
                f"{sampling.guidance} takes {rows}: plan with the geometry of this sampling "
                f"(`Model.geometry_for`)"
            )
        return rows

    def _bytes_per_token(self, batch_size: int, dtype) -> int:
        g, dtype = self.geometry, arguments.dtype("dtype", dtype, KV_DTYPES)
        batch_size = arguments.integer("batch_size", batch_size, 1, arguments.LARGEST_BATCH)
        # one scale for the key, one for the value of a slot: per token, so that writing a token
        # never changes what its neighbours in the block mean
        scales = 2 * item_size("float32") if dtype == "int8" else 0
        per_row = 2 * g.head_dim * item_size(dtype) + scales
        return batch_size * g.rows_per_image * per_row

    @property
    def live_tokens(self) -> np.ndarray:
        """int64 [K, L]: tokens in the whole cache (one row) right after layer l of scale or stage s
        has stored."""
        raise NotImplementedError

    @property
    def used_slots(self) -> np.ndarray:
        """int64 [K, L]: likewise slots in use, whole blocks."""
        raise NotImplementedError

    @property
    def peak_live_fraction(self) -> float:
        """Largest number of live tokens at any time, as a fraction of the full cache."""
        return float(self.live_tokens.max() / max(1, self.geometry.dense_tokens))

    @property
    def fraction(self) -> float:
        """Slots of the pool as a fraction of the full cache."""
        return self.pool_tokens / max(1, self.geometry.dense_tokens)

    # --- identity ---------------------------------------------------------------------------------

    def _decided(self) -> tuple[np.ndarray | None, ...]:
        """Arrays that the compiled program reads or depends on."""
        raise NotImplementedError

    @cached_property
    def digest(self) -> str:
        # What the compiled program reads, not how it came about: runs and cells of a sweep may go
        # on with a plan that was made another way but is the same.
        h = hashlib.sha256(
            repr((self.geometry, self.block_size, self.pool_blocks, self.accounting)).encode()
        )
        for array in self._decided():
            h.update(b"-" if array is None else np.ascontiguousarray(array, np.int32))
        return h.hexdigest()

    def __hash__(self):
        return hash(self.digest)

    def __eq__(self, other):
        return isinstance(other, CachePlan) and self.digest == other.digest


@dataclass(frozen=True, eq=False, kw_only=True)
class ScalePlan(CachePlan):
    """Capacities, block tables and pool size for a model that draws scale by scale.

    Letters: K scales, L layers, N heads (regions), M table entries, P slots.
    ids int32, start and stop uint8 [K, L, N, M]: the slots that scale s reads (`BlockTable`
      entries; blocks have at most 128 slots).
    write_slots: int32 [L, N, tokens], where a token is stored (-1: never); None where the device
      decides.
    """

    allocation: Allocation
    ids: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    write_slots: np.ndarray | None
    blocks_after_store: np.ndarray

    @cached_property
    def live_tokens(self) -> np.ndarray:
        """int64 [K, L]: tokens in the whole cache (one row) right after layer l of scale s has
        stored."""
        return allocator.after_each_store(self.capacity.sum(-1, dtype=np.int64))

    @property
    def used_slots(self) -> np.ndarray:
        return self.blocks_after_store * self.block_size

    # --- what the program needs to know statically ------------------------------------------------

    @property
    def static_content(self) -> bool:
        return isinstance(self.allocation, StaticAllocation)

    def entries(self, scale: int) -> int:
        """Table entries that scale `scale` needs (most over layers and heads)."""
        return int((self.stop[scale] > self.start[scale]).sum(-1).max(initial=0))

    def stores(self, scale: int) -> bool:
        """Whether anything of scale `scale` is stored in any layer or head."""
        if scale == self.geometry.schedule.num_scales - 1:
            return False  # nothing follows that could read it
        if self.write_slots is None:
            return True  # which tokens stay is not known here; room for some is always planned
        first, last = self.geometry.schedule.starts[scale], self.geometry.schedule.ends[scale]
        return bool((self.write_slots[:, :, first:last] >= 0).any())

    def selects(self, scale: int) -> bool:
        """Whether the device has to choose what survives scale `scale`."""
        if not isinstance(self.allocation, RegionAllocation) or not self.stores(scale):
            return False
        # Where every region has room for all new tokens there is nothing to choose, and neither the
        # selection nor what it would have to observe is compiled. Ragged rows may hold fewer tokens
        # than the capacity says, so "room for all" cannot be seen from capacities there.
        grown = self.capacity[scale] + self.geometry.schedule.tokens[scale]
        return self.allocation.ragged or bool((self.capacity[scale + 1] < grown).any())

    def moves(self, scale: int) -> bool:
        """Whether what scale `scale` leaves has to be put into its slots one by one: tokens stored
        earlier may change theirs, or a region has two runs in one block, which the kernels that
        write blocks do not take (`BlockWrites`)."""
        if not isinstance(self.allocation, RegionAllocation) or not self.stores(scale):
            return False
        # A region is a prefix of its slots. Stored tokens keep theirs unless a head changes its
        # region, whether or not there is room for all, the prefix gets shorter, or a row holds less
        # than the prefix (ragged).
        if scale == self.allocation.regroup_scale or self._two_runs_in_a_block(scale + 1):
            return True
        shrinks = (self.capacity[scale + 1] < self.capacity[scale]).any()
        return bool((self.allocation.ragged or shrinks) and self.selects(scale))

    def _two_runs_in_a_block(self, scale: int) -> bool:
        """Whether a table of a scale lists some block twice."""
        used = self.stop[scale] > self.start[scale]
        # empty entries as numbers that occur once
        ids = np.where(used, self.ids[scale], -1 - np.arange(used.shape[-1]))
        return bool((np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any())

    def _decided(self) -> tuple[np.ndarray | None, ...]:
        return self.capacity, self.ids, self.start, self.stop, self.write_slots


def item_size(dtype) -> int:
    """Bytes of one number of a type, bfloat16 included."""
    return jnp.dtype(dtype).itemsize


def build_plan(
    geometry: Geometry,
    allocation: Allocation,
    *,
    block_size: int,
    budget: float,
    accounting: str,
    policy=None,
) -> ScalePlan:
    """Lay out an allocation in blocks of `block_size` slots and number them."""
    layout = allocator.Layout(geometry, allocation, block_size)
    return ScalePlan(
        geometry=geometry,
        allocation=allocation,
        block_size=block_size,
        pool_blocks=layout.num_blocks,
        capacity=allocation.capacity(geometry),
        ids=layout.ids,
        start=layout.start,
        stop=layout.stop,
        write_slots=layout.write_slots,
        blocks_after_store=layout.blocks_in_use,
        budget=budget,
        accounting=accounting,
        policy=policy,
    )


def check_block_size(block_size: int) -> int:
    """A power of two from 1 to 128."""
    if block_size not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise UserError(
            f"block_size={block_size}: choose a power of two from 1 to 128, or 0 to let the "
            f"planner choose"
        )
    return block_size
