"""The plan of a model that draws scale by scale: block tables of every scale, layer and head."""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
from jaxtyping import Array

from varjax.core import allocator
from varjax.core.allocation import Allocation, Geometry, RegionAllocation, StaticAllocation
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.core.policy import Policy
from varjax.core.state import KVState

NOT_DIVIDED = (
    "decides on the device what to keep, which does not work with heads on several devices yet"
)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ScalePlan(CachePlan):
    """Capacities, block tables and pool size.

    Letters: K scales, L layers, N heads (regions), M table entries, P slots.
    ids, start, stop: int32, uint8, uint8 [K, L, N, M], the slots that scale s reads, as entries of
      a `BlockTable`. Blocks have at most 128 slots.
    write_slots: int32 [L, N, tokens], where a token is stored (-1: never); None where the device
      decides.
    blocks_after_store: int64 [K, L], blocks in use right after layer l of scale s has stored.
    """

    allocation: Allocation
    ids: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    write_slots: np.ndarray | None
    blocks_after_store: np.ndarray

    @property
    def whole_because(self) -> str | None:
        if self.static_content:
            return None
        return (
            f"{NOT_DIVIDED}: use data only, or a policy whose contents are known beforehand (full, "
            "swa, streaming, heatkv, table)"
        )

    @cached_property
    def live_tokens(self) -> np.ndarray:
        return allocator.after_each_store(self.capacity.sum(-1, dtype=np.int64))

    @property
    def used_slots(self) -> np.ndarray:
        return self.blocks_after_store * self.block_size

    # --- the cache on the device ------------------------------------------------------------------

    def empty_state(
        self, batch_size: int, dtype, compute_dtype="float32", *, groups: int = 1
    ) -> KVState:
        # A device indexes its own pool, so block numbers need no offset: only the array is longer.
        blocks = groups * self.divide(groups)[0].pool_blocks
        whole = replace(self, pool_blocks=blocks)
        return KVState.empty(whole, batch_size, dtype, compute_dtype)

    def kv_arrays(self, state: KVState) -> list[Array]:
        return jax.tree.leaves((state.kv_pool, state.kv_scale))

    def divide(self, groups: int) -> tuple["ScalePlan", ...]:
        if groups == 1:
            return (self,)
        if not isinstance(self.allocation, StaticAllocation):
            raise UserError(f"policy {self.policy.name!r} {NOT_DIVIDED}")
        heads = self.geometry.num_heads // groups
        geometry = replace(self.geometry, num_heads=heads)
        plans = []
        # Every device lays out its own heads, so that block numbers are those of its own pool.
        for first in range(0, self.geometry.num_heads, heads):
            part = StaticAllocation(self.allocation.last_use[:, first : first + heads])
            plans.append(build_plan(geometry, part, self.block_size, self.policy))
        # One program serves all devices: their pools have the size of the fullest.
        blocks = max(plan.pool_blocks for plan in plans)
        return tuple(replace(plan, pool_blocks=blocks) for plan in plans)

    # --- what the program needs to know statically ------------------------------------------------

    @property
    def static_content(self) -> bool:
        return isinstance(self.allocation, StaticAllocation)

    def entries(self, scale: int) -> int:
        """Table entries that the fullest head needs at a scale."""
        return int((self.stop[scale] > self.start[scale]).sum(-1).max(initial=0))

    def stores(self, scale: int) -> bool:
        """Whether anything of scale `scale` is stored in any layer or head."""
        if scale == self.geometry.schedule.num_scales - 1:
            return False  # nothing follows that could read it
        if self.write_slots is None:
            return True  # which tokens stay is not known here; room for some is always planned
        first, last = self.geometry.schedule.starts[scale], self.geometry.schedule.ends[scale]
        return bool((self.write_slots[:, :, first:last] >= 0).any())

    def overwrites(self, scale: int) -> bool:
        """Whether some layer stores tokens of scale `scale` in slots that it reads at that scale,
        as far as that is known here."""
        if self.write_slots is None:
            return True
        starts, ends = self.geometry.schedule.starts, self.geometry.schedule.ends
        # only what the scale frees is taken by its own tokens: all else that it reads stays
        freed = self.allocation.last_use[..., : starts[scale]] == scale
        if not freed.any() or not self.stores(scale):
            return False
        # -1 is no slot: tokens that stay, or were never stored
        read = np.where(freed, self.write_slots[..., : starts[scale]], -1)
        written = self.write_slots[..., starts[scale] : ends[scale]]
        pairs = zip(read, written, strict=True)  # layer by layer
        return any(np.intersect1d(a[a >= 0], b[b >= 0]).size for a, b in pairs)

    def keeps(self, scale: int) -> bool:
        """Whether every layer and head stores all tokens of a scale and keeps all that it reads at
        that scale, as far as that is known here."""
        if not self.static_content or not self.stores(scale):
            return False
        ends = self.geometry.schedule.ends[scale]
        return not (self.allocation.last_use[..., :ends] == scale).any()

    @property
    def chooses(self) -> bool:
        return any(map(self.selects, range(self.geometry.schedule.num_scales)))

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
        """Whether what scale `scale` leaves has to be put into its slots one by one. Tokens stored
        earlier may change their slots; or a region has two runs in one block, which the kernels
        that write blocks do not take (`BlockWrites`)."""
        if not isinstance(self.allocation, RegionAllocation) or not self.stores(scale):
            return False
        # A region is a prefix of its slots. Stored tokens keep theirs unless a head changes its
        # region (even where there is room for all), the prefix gets shorter, or a row holds less
        # than the prefix (ragged).
        used = self.stop[scale + 1] > self.start[scale + 1]
        # an empty entry gets a number that occurs nowhere else, so that only real ones can be equal
        ids = np.where(used, self.ids[scale + 1], -1 - np.arange(used.shape[-1]))
        two_runs_in_a_block = (np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any()
        if scale == self.allocation.regroup_scale or two_runs_in_a_block:
            return True
        shrinks = (self.capacity[scale + 1] < self.capacity[scale]).any()
        return bool((self.allocation.ragged or shrinks) and self.selects(scale))

    def _decided(self) -> tuple[np.ndarray | None, ...]:
        return self.capacity, self.ids, self.start, self.stop, self.write_slots

    # --- for people -------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        schedule = self.geometry.schedule
        found = {"schedule": np.array(schedule.maps, np.int32)}
        if self.static_content:
            scales = range(schedule.num_scales)
            visible = (self.allocation.visible(self.geometry, s) for s in scales)
            # [K, L, N, K]: how many tokens of scale j scale s sees
            seen = (np.add.reduceat(v, schedule.starts, axis=-1, dtype=np.int32) for v in visible)
            count = np.stack(list(seen))
            found |= {"keep_scale": count > 0, "keep_count": count}
        return found


def build_plan(
    geometry: Geometry, allocation: Allocation, block_size: int, policy: Policy
) -> ScalePlan:
    """Lays out an allocation in blocks of `block_size` slots and numbers them."""
    layout = allocator.PoolLayout(geometry, allocation, block_size)
    return ScalePlan(
        geometry=geometry,
        allocation=allocation,
        block_size=block_size,
        pool_blocks=layout.num_blocks,
        capacity=allocation.capacity(geometry),
        policy=policy,
        ids=layout.ids,
        start=layout.start,
        stop=layout.stop,
        write_slots=layout.write_slots,
        blocks_after_store=layout.blocks_in_use,
    )
