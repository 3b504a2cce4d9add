"""AMS-KV: condensed and local scales, more of them in layers whose keys change from scale to
scale."""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from varjax.cache import planner
from varjax.cache.allocation import Allocation, RegionAllocation, StaticAllocation
from varjax.cache.geometry import Geometry
from varjax.calibration.data import Calibration
from varjax.policies import amskv_arguments as arguments
from varjax.policies import amskv_layers as which
from varjax.policies import amskv_rules as rules
from varjax.policies.amskv_arguments import BY_SIMILARITY
from varjax.policies.base import Needs, NotGiven, Observation, Policy
from varjax.policies.registry import register


@register("amskv")
@dataclass(frozen=True, kw_only=True)
class AMSKV(Policy):
    """AMS-KV ("Adaptive KV Caching in Multi-Scale Visual Autoregressive Transformers", AAAI 2026).

    Idea: what matters to a new scale are the first scales (condensed: few tokens, much attention)
      and the newest ones (local); those between can go. Most layers do with few tokens; demanding
      layers, whose keys differ from those of the scale before, get a larger cache.

    1. Algorithm 1, for every layer: its room is Cmin. A scale larger than Cmax is not stored. If
       appending a scale exceeds the room and the similarity S is below theta, the room becomes
       Cmax, for good. A scale larger than the room is not stored.
    2. Algorithm 2 (CLRU), if the room is exceeded: keep the condensed tokens, which are locked, and
       the newest (room - condensed) others.
    3. Eq. 3: S = -||k_i - resized k_(i-1)||_2, averaged over heads and tokens, per row online, and
       also over samples in a calibration (`key_discrepancy` = -S).

    mode=profiled: which layers are demanding is decided once per model, memory is static.
    mode=online: decided by the test of Eq. 3 while generating, per image and guidance row. Any
      layer may turn out to be demanding, so the planned bytes are Cmax in every layer.

    Which layers, in profiled mode, is said by `layers`, or by placement=uniform, or by
    `--calibration=FILE` (key_discrepancy, from `python -m experiments.calibrate`): the `demanding`
    least similar layers by the mean over scales, or with `theta` Algorithm 1 on the measured
    values, scale by scale. Only presets do without: they take the first layers, a guess, as the
    paper does not say where its demanding layers lie (the bytes do not depend on it).

    Args:
      budget: fraction of the full cache (0.25). If the sizes are given, by preset or otherwise, the
        sizes decide: the budget is what they cost, and one that is given is a limit to check.
      mode: profiled or online.
      preset: published configuration; fills in the arguments below that it names. d30-table3,
        d36-table3, d30-abstract: sizes that reproduce the published memory. Ablations:
        d30-table1-condensed, -intermediate, -local; d30-table2-uniform, -similarity;
        d30-table7-0, -1, -2. d30-stated, d36-stated: the sizes that the text states.
      cmin, cmax: tokens of efficient and demanding layers; 0 takes them from the budget.
      condensed: locked scales; -1 (automatic) takes two, or as many as fit half of a Cmin that
        comes from the budget. condensed_tokens: the same in tokens.
      demanding: number of demanding layers; -1 (automatic) takes a quarter of them.
      layers: demanding layers, for example 0;3;5 or 0-7, all, none.
      placement: similarity, or uniform: evenly over the depth (Table 2).
      theta: threshold of the similarity, below 0; 0 is automatic, in online mode -1 (keys of norm 1
        at 60 degrees) or, with a calibration, between the `demanding` layers and the others. Keys
        that are not normalised are further apart: there -1 makes every layer demanding.
      ratio: Cmax over Cmin where they come from the budget; about that of the stated sizes.
      granularity: token cuts the tail by tokens, so that a scale may be kept in part; scale drops
        whole scales, oldest first.
      oversize: skip leaves out a scale that is larger than the room, as printed; fill keeps as many
        of its newest tokens as find room. auto: skip for given sizes; fill (by tokens) for a
        budget, which a literal reading can leave largely unused.
      remove: condensed, intermediate or local: a full cache without these scales (Table 1). Says
        everything, so nothing else but condensed and local goes with it. local: how many scales.

    Differs from the paper, or reads it so:
      - Condensed scales are subtracted from token sizes, so they are counted in tokens (5 for 1x1
        and 2x2).
      - Attention comes before rolling: a scale sees itself and what was held before, and the last
        scale is never stored. The published memory counts what Algorithm 1 holds after the last
        scale, N * Cmax + (L - N) * Cmin; `experiments.plan` prints that and ours, the peak.
      - The stated sizes (last two or penultimate scale, plus condensed) do not give the published
        memory; the presets are the only scale-aligned sizes that do, given one stated capacity.
      - Tokens evicted before a layer turns demanding do not come back. There is no test at the
        first scale.
      - Table 1 does not define its groups per scale: condensed scales and the last `local` stored
        ones are never stored; intermediate ones go when they are older than the `local` newest.
    """

    budget: float = NotGiven(0.25)
    mode: str = "profiled"
    preset: str = ""
    cmin: int = 0
    cmax: int = 0
    condensed: int = -1
    condensed_tokens: int = -1
    demanding: int = -1
    layers: str = ""
    placement: str = BY_SIMILARITY
    theta: float = 0.0
    ratio: float = 2.5
    granularity: str = "token"
    oversize: str = "auto"
    remove: str = ""
    local: int = 2

    selection_arguments = ("condensed", "condensed_tokens", "granularity")
    summary = "condensed and newest scales, more in layers whose keys change; needs a calibration"
    uses_calibration = True
    contents = "known beforehand, or per image"
    examples = ({}, {"mode": "online"}, {"placement": "uniform"})

    @property
    def needs(self) -> Needs:
        return Needs(key_similarity=self._online)

    @property
    def budgeted(self) -> bool:
        """Whether sizes follow from the budget."""
        return not (self.cmax or self.remove)

    @property
    def shrinks(self) -> bool:
        return self.budgeted

    @property
    def _online(self) -> bool:
        return self.mode == "online"

    # --- arguments --------------------------------------------------------------------------------

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "AMSKV":
        if calibration is not None:
            calibration.check(geometry)
        policy = self
        if self.preset:
            values = arguments.preset_values(self, geometry)
            policy = dataclasses.replace(self, preset="", **values)
        arguments.check(policy, geometry)
        policy = which.decide(policy, geometry, calibration, guess=bool(self.preset))
        return policy if policy.budgeted else policy._with_cost(geometry, calibration)

    def check(self, geometry: Geometry) -> None:
        arguments.check(self, geometry)
        super().check(geometry)

    def _with_cost(self, geometry: Geometry, calibration) -> "AMSKV":
        """With the budget that the sizes cost, unless one was given; then it is checked."""
        allocation = self.allocate(geometry, 1.0, calibration)
        peak = planner.peak_tokens(geometry, allocation)
        dense = max(1, geometry.dense_tokens)
        if isinstance(self.budget, NotGiven):
            budget = planner.cost(geometry, allocation, self.block_size)
            return dataclasses.replace(self, budget=budget)
        if peak > self.budget * dense + 1e-6:
            arguments.refuse(
                f"the given sizes hold up to {peak / dense:.4f} of the full cache, more than "
                f"budget={self.budget:g}: raise the budget, leave it out, or choose smaller sizes"
            )
        return self

    # --- sizes and contents -----------------------------------------------------------------------

    def locked_tokens(self, geometry: Geometry, cmin: int) -> int:
        """Tokens of the condensed scales beside a Cmin."""
        schedule, scales = geometry.schedule, self.condensed
        if self.condensed_tokens >= 0:
            return self.condensed_tokens
        if scales < 0 and not (self.cmax or self.remove):
            return rules.automatic_condensed(schedule, cmin)
        if scales < 0:
            scales = min(rules.MOST_AUTOMATIC_CONDENSED, schedule.num_scales - 1)
        return schedule.ends[scales - 1] if scales else 0

    def _least_room(self, geometry: Geometry) -> int:
        automatic = max(self.condensed, self.condensed_tokens) < 0
        return 1 if automatic else 1 + self.locked_tokens(geometry, 0)

    def minimum_budget(self, geometry: Geometry) -> float:
        least = self._least_room(geometry)
        return min(1.0, least / max(1, geometry.schedule.persistent_tokens))

    def smallest_reason(self) -> str:
        return "every layer needs room for its condensed scales and one more token"

    def sizes(self, geometry: Geometry, budget: float, calibration=None) -> rules.Sizes:
        """Cmin, Cmax and the reading of the rules, as given or as a budget leads to them."""
        if self.cmax or self._online:
            return self._divided(geometry, budget, 0)
        below = which.below(self, geometry, calibration)[:, :-1]
        number = int(below.any(1).sum())
        found = self._divided(geometry, budget, number)
        while self.theta:  # layers that Algorithm 1 does not come to test leave room for others
            fewer = int(rules.turned(geometry.schedule.tokens[:-1], found, below).sum())
            better = self._divided(geometry, budget, fewer)
            again = int(rules.turned(geometry.schedule.tokens[:-1], better, below).sum())
            if fewer >= number or again > fewer:
                break
            number, found = fewer, better
        return found

    def _divided(self, geometry: Geometry, budget: float, number: int) -> rules.Sizes:
        """Sizes for so many demanding layers."""
        cmin, cmax, whole = self.cmin, self.cmax, self.granularity == "scale"
        fill = self.oversize == "fill"
        if not cmax:
            least = self._least_room(geometry)
            fill = self.oversize != "skip" and not whole
            if self._online:
                cmin, cmax = rules.divide_online(geometry, budget, least, self.ratio)
            else:
                cmin, cmax = rules.divide(geometry, budget, number, least, self.ratio)
        locked = self.locked_tokens(geometry, cmin)
        return rules.Sizes(cmin=cmin, cmax=cmax, condensed=locked, whole_scales=whole, fill=fill)

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> Allocation:
        schedule = geometry.schedule
        if self.remove:
            locked = self.locked_tokens(geometry, 0)
            visible = rules.without_group(schedule, self.remove, locked, self.local)
            return StaticAllocation.from_visibility(geometry, visible[:, None, None])
        sizes = self.sizes(geometry, budget, calibration)
        if self._online:
            held = np.minimum(schedule.starts, sizes.cmax)[:, None, None]
            shape = (schedule.num_scales, geometry.num_layers, geometry.num_heads)
            return RegionAllocation(
                np.broadcast_to(held, shape).astype(np.int32),
                ragged=True,
                protected=sizes.condensed,
                recent=min(sizes.cmin, schedule.persistent_tokens) - sizes.condensed,
            )
        below = which.below(self, geometry, calibration)
        kinds, kind_of_layer = np.unique(below, axis=0, return_inverse=True)
        held = [rules.cache_layer(schedule.tokens, sizes, kind)[0] for kind in kinds]
        last_use = np.stack([schedule.scale_of_token + h[:-1].sum(0) for h in held])
        last_use = last_use[kind_of_layer.reshape(-1), None].astype(np.int16)
        return StaticAllocation(np.repeat(last_use, geometry.num_heads, axis=1))

    def steady_tokens(self, geometry: Geometry, calibration=None) -> int | None:
        """What the paper counts: tokens of one head, summed over layers, that the caches may hold
        after the last scale. None where the paper counts nothing (`remove`)."""
        if self.remove:
            return None
        sizes, layers = self.sizes(geometry, self.budget, calibration), geometry.num_layers
        wide = layers if self._online else self._turned(geometry, sizes, calibration).sum()
        return int(wide * sizes.cmax + (layers - wide) * sizes.cmin)

    def _turned(self, geometry: Geometry, sizes: rules.Sizes, calibration) -> np.ndarray:
        """bool [L]: layers that end with Cmax."""
        return rules.turned(
            geometry.schedule.tokens, sizes, which.below(self, geometry, calibration)
        )

    def plan_lines(self, geometry: Geometry, calibration=None) -> list[str]:
        """What a printed plan says about a prepared policy."""
        if self.remove:
            return [f"layers    all without their {self.remove} scales"]
        sizes = self.sizes(geometry, self.budget, calibration)
        rest = f"{sizes.condensed} of them condensed"
        rest += "" if self.cmax else " (before rounding to blocks)"
        if self._online:
            assumed = (
                f"theta     {self.theta:g} is assumed, for keys of norm 1; if this model does not "
                f"normalise its keys, give --calibration=FILE or theta="
            )
            return [
                f"layers    demanding ones are found while generating (similarity below "
                f"{self.theta:g}), so every layer is planned with Cmax",
                *([assumed] if isinstance(self.theta, NotGiven) else []),
                f"sizes     Cmin {sizes.cmin}, Cmax {sizes.cmax} tokens, {rest}",
            ]
        turned = np.flatnonzero(self._turned(geometry, sizes, calibration)).tolist()
        if sizes.cmin == sizes.cmax:
            return [f"sizes     {sizes.cmin} tokens in every layer, {rest}"]
        return [
            f"layers    demanding: {' '.join(map(str, turned)) or 'none'}",
            f"sizes     Cmax {sizes.cmax} tokens in {len(turned)} of {geometry.num_layers} layers, "
            f"Cmin {sizes.cmin} in the others, {rest}",
        ]

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> RegionAllocation:
        """Condensed and newest tokens (CLRU) in rooms that another policy has decided."""
        if self.granularity == "scale" or self.remove:
            arguments.refuse("in rooms of another policy only granularity=token works")
        full = geometry.schedule.persistent_tokens
        locked = self.locked_tokens(geometry, int(budget * full + 1e-6))
        return RegionAllocation(capacity, protected=locked, recent=full)

    # --- device -----------------------------------------------------------------------------------

    def inputs(self, geometry: Geometry, allocation: RegionAllocation, image_index: np.ndarray):
        """Per scale and layer: sizes int32 [K, L, 4], (Cmin, Cmax, condensed tokens, whether
        oversize scales fill what is left); starts int32 [K, L, K], of the scales."""
        if not isinstance(allocation, RegionAllocation):
            return None
        cmin = allocation.protected + allocation.recent
        cmax = max(cmin, int(allocation.region_capacity.max(initial=0)))
        adopted = allocation.recent >= geometry.schedule.persistent_tokens
        fill = adopted or self.sizes(geometry, self.budget).fill
        shape = (geometry.schedule.num_scales, geometry.num_layers)
        values = {
            "sizes": (cmin, cmax, allocation.protected, fill),
            "starts": geometry.schedule.starts,
        }
        return {
            name: np.broadcast_to(np.array(value, np.int32), (*shape, len(value)))
            for name, value in values.items()
        }

    def init_state(self, geometry: Geometry, rows: int):
        """bool [R], whether the layer is demanding."""
        return np.zeros(rows, bool) if self._online else None

    def update_state(self, obs: Observation):
        if not self._online:
            return obs.state
        cmin, cmax, _, fill = obs.inputs["sizes"]
        new, held = (obs.live & obs.own)[:, 0].sum(-1), obs.live[:, 0].sum(-1)
        exhausted = (held > cmin) & ((new <= cmax) | (fill > 0)) & (obs.scale > 0)
        return obs.state | (exhausted & (obs.key_similarity < self.theta))

    def select(self, obs: Observation):
        cmin, cmax, condensed, fill = obs.inputs["sizes"]
        room = jnp.broadcast_to(cmin, obs.capacity.shape)
        if obs.state is not None:
            room = jnp.where(obs.state[:, None], cmax, room)
        starts = obs.inputs["starts"] if self.granularity == "scale" else None
        room = jnp.minimum(room, obs.capacity)
        return rules.keep(obs, room, jnp.minimum(condensed, room), fill > 0, starts)
