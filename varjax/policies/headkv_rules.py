"""The rules of HeadKV, for models that draw scale by scale and token by token; its manual is
`varjax.policies.headkv.HeadKV`."""

from dataclasses import replace
from operator import attrgetter

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from varjax.calibration.data import Calibration
from varjax.core import masks
from varjax.core.allocation import Geometry, RegionAllocation, StageAllocation
from varjax.core.errors import choose
from varjax.core.observation import Needs, Observation
from varjax.core.policy import Policy
from varjax.policies import capacities
from varjax.policies.scale_rule import per_layer
from varjax.policies.token_rule import WindowedRule
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

    def inputs(self, geometry: Geometry, allocation: RegionAllocation, image_index: np.ndarray):
        """int32 [K, L, 2]: protected tokens and recent tokens, both static."""
        return per_layer(geometry, np.int32([allocation.protected, allocation.recent]))

    def regroup(self, obs: Observation):
        """Regions 0..G-1 are global. Heads are ranked by need; ties: lower number first."""
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


class HeadKVTokens(WindowedRule):
    """The paper's own method: local and global heads, stratified eviction after every stage."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, newest_mass=True)

    @property
    def compares_heads(self) -> str | None:
        number = self.policy.global_heads
        return f"global_heads={number}" if number else None

    local_window = property(attrgetter("policy.window"))

    def check(self, geometry: Geometry) -> None:
        super().check(geometry)
        self.policy.check_quota(geometry)
        choose("grouping", self.policy.grouping, ("budget", "paper"))

    def check_budget(self, geometry: Geometry) -> None:
        super().check_budget(geometry)
        policy, sequence = self.policy, geometry.schedule
        if policy.accounting != "bytes" or policy.grouping != "paper":
            return
        peak = sequence.condition + min(self._drawn_until_grouping(geometry), sequence.steps)
        share = min(1.0, peak / sequence.persistent_tokens)
        if policy.budget < share - 1e-9:
            policy.refuse(
                f"grouping=paper holds {peak} tokens per head before it groups heads, {share:.4f} "
                f"of the full cache, more than budget={policy.budget:g}: raise the budget, or give "
                f"accounting=tokens or grouping=budget"
            )

    def _drawn_until_grouping(self, geometry: Geometry) -> int:
        """Image tokens that are drawn when more than `group_after` tokens are held for the first
        time after a stage, if nothing is dropped before."""
        more = max(0, self.policy.group_after - geometry.schedule.condition) + 1
        return -(-more // self.policy.period) * self.policy.period

    def allocate(self, geometry: Geometry, budget: float) -> StageAllocation:
        slots, period = self.slots(geometry, budget), self.policy.period
        kept, drawn = slots - period, self._drawn_until_grouping(geometry)
        if self.policy.grouping == "budget":
            # what no longer fits is drawn in the stage after `kept` tokens are held
            drawn = min(drawn, (kept // period + 1) * period)
        group = drawn // period - 1
        if group >= geometry.schedule.stages(period)[0]:
            return StageAllocation.uniform(geometry, slots, period)
        return StageAllocation.uniform(
            geometry,
            max(slots, drawn),
            period,
            kept=kept if drawn > slots else None,
            group_stage=group,
        )

    def plan_lines(self, geometry: Geometry) -> list[str]:
        group, period = self.allocate(geometry, self.policy.budget).group_stage, self.policy.period
        when = "never" if group is None else f"after {(group + 1) * period} image tokens"
        grouping = f"grouping  {when}; local heads see the newest {self.policy.window}"
        return [*super().plan_lines(geometry), grouping]

    def regroup(self, obs: Observation):
        """1 where a head is local: its newest `window` tokens gather `threshold` of the newest
        query's attention, or it is not among the `global_heads` neediest of its layer and row. Of
        query heads that share keys the neediest counts, so one global head makes all global."""
        policy, threshold = self.policy, self.policy.threshold
        if obs.group_mass is None:
            mass = obs.newest_mass
            need = tokens_needed(mass, obs.position, obs.live, threshold)
        else:  # an axis for the query heads of a group, which hold the same
            position, live = obs.position[:, :, None], obs.live[:, :, None]
            need = tokens_needed(obs.group_mass, position, live, threshold).max(-1)
        if not policy.global_heads:
            return (need < policy.window).astype(jnp.int32)
        number = jnp.broadcast_to(-jnp.arange(need.shape[1], dtype=jnp.int32), need.shape)
        # needs and head numbers stand for scores and places of tokens
        local = masks.lowest(
            obs,
            need[:, None],
            jnp.ones_like(need, bool)[:, None],
            jnp.full((len(need), 1), need.shape[1] - policy.global_heads, jnp.int32),
            tie=number[:, None],
        )[:, 0]
        return local.astype(jnp.int32)

    def select(self, obs: Observation):
        """History is split by rank, oldest first; the newer `ratio` is near (rounded up). The
        lowest half of what goes comes from the far part, the other half, the larger one, from the
        near part. What one part cannot give, the other gives.

        Tokens are ranked twice: by age among all live tokens, and by score within their part. These
        rankings are the cost of a decision.
        """
        policy = self.policy
        score = obs.window_logits if policy.score == "logit" else obs.scale_mass
        age, total = masks.age_rank(obs, obs.live), obs.live.sum(-1)
        newest = obs.live & (age >= total[..., None] - policy.window)
        first = obs.live & (obs.position < policy.sinks)
        history, surplus = obs.live & ~newest & ~first, total - obs.capacity
        age = age - first.sum(-1, keepdims=True)  # within history: all sinks are older
        total = history.sum(-1, dtype=jnp.int32)
        far_size = jnp.floor((1 - policy.ratio) * total + 1e-3).astype(jnp.int32)
        far = age < far_size[..., None]
        from_far = jnp.minimum(surplus // 2, far_size)
        from_near = jnp.minimum(surplus - from_far, total - far_size)
        most = jnp.where(far, (surplus - from_near)[..., None], from_near[..., None])
        gone = history & (masks.rank(obs, score, history, part=far) < most)
        if obs.local is not None:  # local heads see no history: the oldest go first
            oldest = history & (age < surplus[..., None])
            gone = jnp.where(obs.local[..., None], oldest, gone)
        return obs.live & ~gone


def tokens_needed(
    mass: Float[Array, "*heads C"],
    position: Int[Array, "*#heads C"],
    live: Bool[Array, "*#heads C"],
    threshold: float,
) -> Int[Array, "*heads"]:
    """The smallest m for which the newest m live tokens have at least `threshold` of the mass; more
    than there are if they have less together."""
    mass = jnp.where(live, mass, 0)
    if position.shape[-1] > masks.MOST_COMPARED:
        order = jnp.argsort(jnp.where(live, -position, 1), axis=-1)
        gathered = jnp.cumsum(jnp.take_along_axis(mass, order, axis=-1), axis=-1)
        live = jnp.take_along_axis(live, order, axis=-1)
    else:
        as_new = position[..., None, :] >= position[..., None]
        gathered = jnp.where(as_new, mass[..., None, :], 0).sum(-1)
    return (live & (gathered < threshold)).sum(-1, dtype=jnp.int32) + 1
