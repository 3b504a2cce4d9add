"""HeadKV: head-aware compression with stratified token eviction, adapted to next-scale
prediction."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from varjax.cache.allocation import Geometry, RegionAllocation
from varjax.policies import building_blocks as blocks
from varjax.policies import capacities
from varjax.policies.base import Needs, Observation, per_layer, within
from varjax.policies.registry import register
from varjax.policies.windows import SinkPolicy


@register("headkv")
@dataclass(frozen=True, kw_only=True)
class HeadKV(SinkPolicy):
    """HeadKV ("Head-Aware Key-Value Compression for Efficient Autoregressive Image Generation"), on
    next-scale models.

    Idea: some heads look at their neighbourhood, others at the whole image, and which is which
    shows early in every image. So local heads get a small cache and global heads a large one,
    decided per image.

    1. Prefill (step 1 of the paper): until the cache holds `group_after` tokens per head nothing is
       dropped.
    2. Grouping (step 2): at that scale, once per image and row, each head is measured by how many
       tokens, counted backwards from the newest (own scale first, then earlier scales), gather
       `threshold` of the attention mass averaged over that scale's queries. The heads that need
       least are local, the others global.
    3. Compression (step 3, Eqs. 2-4): local heads keep the sink scales and recent tokens; global
       heads keep sinks, the same recent tokens, and history.
    4. Stratified eviction (Eqs. 5-6): history is split by age into a near and a far part, the
       nearer `ratio` of it and the rest; each keeps its best by attention from a window of queries,
       `ratio` of the tokens kept being near ones.

    Args:
      budget: mean fraction over heads. Of the mean capacity A = budget * F a local head gets
        local_share * A (at least the sinks), the global heads of the layer share what is left.
      group_after: tokens per head before grouping (the paper's 100 for Janus-Pro and LlamaGen).
      threshold: attention mass that decides a head's type (0.9).
      global_heads: global heads per layer; 0 takes half of them.
      local_share: capacity of a local head relative to the mean.
      sinks: scales never dropped; 0 takes up to 3, as many as fit half of the mean capacity.
      window: queries of the current scale that score the history, spread evenly over it.
      ratio: near part of the history, and of what is kept of it.

    Differs from the paper, because scales replace tokens and because a budget here is a promise:
      - The paper's number of local heads varies per input (need below the window size). Capacities
        must be static here, so the *number* of global heads is fixed and heads are ranked by need;
        of equals, the lower head number counts as global.
      - If the budget cannot hold `group_after` tokens in every head, grouping happens at the first
        scale that would not fit whole, before anything of it is kept: not even early is the budget
        exceeded.
      - The mean over all queries of the grouping scale decides, not one query per head: a scale is
        generated at once. So "recent queries" are spread over the scale, all being equally recent.
      - Recent means newest in raster order; the paper's two image rows become whatever local heads
        have left after their sinks. Its update every few tokens is one after every scale.
    """

    budget: float = 0.25
    group_after: int = within(100, 0, 2**31 - 1)
    threshold: float = within(0.9, 0, 1, above=True)
    global_heads: int = 0
    local_share: float = within(0.5, 0, 1, above=True)
    window: int = 16
    ratio: float = within(0.5, 0, 1, above=True)

    selection_arguments = ("sinks", "local_share", "window", "ratio")
    summary = "local and global heads found per image, stratified eviction"

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, window_mass=True, regroup_mass=True)

    # --- host -------------------------------------------------------------------------------------

    def check(self, geometry: Geometry) -> None:
        most, heads = max(*geometry.schedule.tokens, 16), geometry.num_heads
        self.require("window", 1 <= self.window <= most, f" must be 1 to {most}")
        fits = 0 <= self.global_heads <= heads
        self.require("global_heads", fits, f", but a layer has {heads} heads")
        super().check(geometry)

    def _num_global(self, geometry: Geometry) -> int:
        return self.global_heads or max(1, geometry.num_heads // 2)

    def region_sizes(self, geometry: Geometry, budget: float) -> tuple[int, int]:
        """Tokens of a local and of a global head."""
        full, wide = geometry.schedule.persistent_tokens, self._num_global(geometry)
        narrow, total = geometry.num_heads - wide, capacities.of_layer(geometry, budget)
        share = int(self.local_share * total / geometry.num_heads)
        local = max(self.protected(geometry, budget), share) if narrow else 0
        wide_size = min(full, (total - narrow * local) // wide)
        if narrow and wide_size == full:
            local = min(full, (total - wide * full) // narrow)
        return local, wide_size

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> RegionAllocation:
        schedule, heads = geometry.schedule, geometry.num_heads
        local, wide = self.region_sizes(geometry, budget)
        regions = np.where(np.arange(heads) < self._num_global(geometry), wide, local)
        mean = capacities.of_layer(geometry, budget) / heads
        reached = (end >= self.group_after or end > mean for end in schedule.ends)
        grouping = list(reached).index(True)
        before = np.array(schedule.starts)[:, None, None]
        after = np.arange(schedule.num_scales)[:, None, None] > grouping
        capacity = np.where(after, np.minimum(regions, before), before)
        protected = self.protected(geometry, budget)
        return RegionAllocation(
            np.repeat(capacity, geometry.num_layers, axis=1).astype(np.int32),
            regroup_scale=grouping if grouping < schedule.num_scales - 1 else None,
            protected=protected,
            recent=(local or wide) - protected,
        )

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> RegionAllocation:
        own = self.allocate(geometry, budget)
        return RegionAllocation(capacity, protected=own.protected, recent=own.recent)

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
        return (jnp.cumsum(mass, axis=-1) < self.threshold).sum(-1) + 1

    def select(self, obs: Observation):
        protected, recent = obs.inputs[0], obs.inputs[1]
        kept = blocks.protect(obs.position, obs.live, protected)
        count = jnp.minimum(obs.capacity - kept.sum(-1), recent)
        newest = blocks.recent(obs.position, obs.live & ~kept, count)
        history = obs.live & ~kept & ~newest
        kept = kept | newest
        count = jnp.minimum(obs.capacity - kept.sum(-1), history.sum(-1))
        return kept | blocks.stratified(obs.window_mass, obs.position, history, count, self.ratio)
