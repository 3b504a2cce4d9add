"""HeadKV on models that draw scale by scale; its manual is `varjax.policies.headkv.HeadKV`."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from varjax.calibration.data import Calibration
from varjax.core import masks
from varjax.core.allocation import Geometry, RegionAllocation
from varjax.core.observation import Needs, Observation
from varjax.core.policy import Policy
from varjax.policies import capacities
from varjax.policies.scale_rule import per_layer
from varjax.policies.windows import SinkScales

QUERIES = 16  # of a scale, by default
LOCAL_ONE_IN = 8  # heads, at least one: papers' tables imply 6 to 19 % (docs/lab/demo_policies.md)


class HeadKVScales(SinkScales):
    """Regions of local and global heads, which heads choose once per image, and strata."""

    @property
    def needs(self) -> Needs:
        queries = QUERIES if self.policy.window is None else self.policy.window
        return Needs(window=queries, window_mass=True, regroup_mass=True)

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> Policy:
        return replace(self.policy, window=self.needs.window)

    def check(self, geometry: Geometry) -> None:
        most = max(*geometry.schedule.tokens, 16)
        self.policy.require("window", 1 <= self.needs.window <= most, f" must be 1 to {most}")
        self.policy.check_quota(geometry)
        super().check(geometry)

    def region_sizes(self, geometry: Geometry, budget: float) -> np.ndarray:
        """int [N]: tokens of the regions of a layer, the global ones first. The remainder of an
        uneven division goes to the first regions, whose heads need most."""
        full, heads = geometry.schedule.persistent_tokens, geometry.num_heads
        few = max(1, round(heads / LOCAL_ONE_IN)) if heads > 1 else 0
        wide = self.policy.global_heads or heads - few
        narrow, total = heads - wide, capacities.of_layer(geometry, budget)
        share = int(self.policy.local_share * total / heads + 1e-6)
        local = max(self.protected(geometry, budget), share)
        if narrow and total - narrow * local >= wide * full:
            local = min(full, (total - wide * full) // narrow)
        regions = np.full(heads, local)
        left = min(wide * full, total - narrow * local)
        regions[:wide] = (left + np.arange(wide)[::-1]) // wide
        return regions

    def _recent(self, geometry: Geometry, budget: float) -> int:
        """Newest tokens that a head keeps if it has room for them beside the sinks."""
        mean = capacities.of_layer(geometry, budget) / geometry.num_heads
        return int(self.policy.recent_share * mean + 1e-6)

    def allocate(self, geometry: Geometry, budget: float) -> RegionAllocation:
        schedule, heads = geometry.schedule, geometry.num_heads
        mean = capacities.of_layer(geometry, budget) / heads
        reached = [end >= self.policy.group_after or end > mean for end in schedule.ends]
        grouping = reached.index(True)
        before = np.array(schedule.starts)[:, None, None]
        after = np.arange(schedule.num_scales)[:, None, None] > grouping
        regions = self.region_sizes(geometry, budget)
        capacity = np.where(after, np.minimum(regions, before), before)
        protected = self.protected(geometry, budget)
        return RegionAllocation(
            np.repeat(capacity, geometry.num_layers, axis=1).astype(np.int32),
            regroup_scale=grouping if grouping < schedule.num_scales - 1 else None,
            protected=protected,
            recent=min(self._recent(geometry, budget), int(regions.min()) - protected),
        )

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> RegionAllocation:
        protected, recent = self.protected(geometry, budget), self._recent(geometry, budget)
        return RegionAllocation(capacity, protected=protected, recent=recent)

    # --- device -----------------------------------------------------------------------------------

    def inputs(self, geometry: Geometry, allocation: RegionAllocation, image_index: np.ndarray):
        """int32 [K, L, 2]: protected tokens and recent tokens, both static."""
        return per_layer(geometry, np.int32([allocation.protected, allocation.recent]))

    def regroup(self, obs: Observation):
        """Regions 0..G-1 are global. Heads are ranked by need, the neediest first; ties: lower head
        number first."""
        order = jnp.argsort(-self.tokens_needed(obs), axis=-1, stable=True)
        return jnp.argsort(order, axis=-1).astype(jnp.int32)

    def tokens_needed(self, obs: Observation):
        """int32 [R, N]: newest tokens that gather `threshold` of the scale's mean attention."""
        order = jnp.argsort(jnp.where(obs.live, -obs.position, 1), axis=-1)
        mass = jnp.take_along_axis(obs.scale_mass, order, axis=-1)
        return (jnp.cumsum(mass, axis=-1) < self.policy.threshold).sum(-1) + 1

    def select(self, obs: Observation):
        protected, recent = obs.inputs[0], obs.inputs[1]
        kept = obs.live & (obs.position < protected)
        count = jnp.minimum(obs.capacity - kept.sum(-1), recent)
        newest = masks.newest(obs, obs.live & ~kept, count)
        history = obs.live & ~kept & ~newest
        kept = kept | newest
        count = jnp.minimum(obs.capacity - kept.sum(-1), history.sum(-1))
        ratio = self.policy.ratio
        return kept | masks.stratified(obs, obs.window_mass, history, count, ratio)
