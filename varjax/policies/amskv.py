"""AMS-KV: condensed and newest scales, more of them in layers whose keys change."""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from varjax.cache import allocator, planner
from varjax.cache.allocation import Allocation, Geometry, RegionAllocation, StaticAllocation
from varjax.cache.observation import Needs, Observation
from varjax.calibration.data import Calibration
from varjax.policies import amskv_rules as rules
from varjax.policies import building_blocks as blocks
from varjax.policies import capacities
from varjax.policies.base import CALIBRATE, NotGiven, Policy, per_layer, within
from varjax.policies.registry import register

NEGATIVE = ": similarities are negative distances, choose a number below 0 (or 0 for automatic)"
POSITIONS = 2.0**21  # more than any token's position; a few times as much is exact in float32
CONDENSED_SCALES = 2  # as in the paper
UNIT_KEYS_THRESHOLD = NotGiven(-1.0)  # keys of norm 1 that stand at 60 degrees


@register("amskv")
@dataclass(frozen=True, kw_only=True)
class AMSKV(Policy):
    """AMS-KV ("Adaptive KV Caching in Multi-Scale Visual Autoregressive Transformers", AAAI 2026).

    Idea: what matters to a new scale are the first scales (condensed: few tokens, much attention)
      and the newest ones (local). Most layers do with few tokens; demanding layers, whose keys
      differ from those of the scale before, get a larger cache.

    1. Algorithm 1, for every layer: its capacity is Cmin. A scale larger than Cmax is not stored.
       If appending a scale exceeds the capacity and the similarity S is below theta, the capacity
       becomes Cmax for good. A scale larger than the capacity is not stored.
    2. Algorithm 2 (CLRU), if the capacity is exceeded: keep the condensed tokens, which are locked,
       and the newest (capacity - condensed) others.
    3. Eq. 3: S = -||k_i - resized k_(i-1)||_2, averaged over heads and tokens, per row online, and
       also over samples in a calibration (`key_discrepancy` = -S).

    mode=profiled: demanding layers are decided once per model and contents are static. Demanding
      are the layers named by `layers`; or, from a calibration, the `demanding` least similar ones
      (mean over scales); or, with `theta`, those that Algorithm 1 finds on the measured values.
      Presets need no calibration and take the first layers. That is a guess: the paper does not say
      which they are, and the bytes do not depend on it.
    mode=online: the test of Eq. 3 decides while generating, per image and guidance row. Any layer
      may turn out to be demanding, so the planned bytes are Cmax in every layer.

    Args:
      budget: fraction of the full cache (0.25). Where sizes are given, they decide: the budget is
        then what they cost, and a budget that is given is a limit to check.
      mode: profiled or online.
      preset: d30-table3, d36-table3 or d30-abstract: cmin, cmax and demanding that reproduce the
        published memory.
      cmin, cmax: tokens of efficient and demanding layers; 0 takes them from the budget.
      condensed: locked scales; -1 (automatic) takes two, or as many as fit half of a Cmin that
        comes from the budget.
      condensed_tokens: the same in tokens.
      demanding: number of demanding layers; -1 (automatic) takes a quarter of them.
      layers: demanding layers, for example 0;3;5 or 0-7, all, none.
      theta: threshold of the similarity, below 0. 0 is automatic: in online mode -1 (keys of norm 1
        at 60 degrees; keys of other models are further apart) or, with a calibration, between the
        `demanding` layers and the others.
      ratio: Cmax over Cmin where they come from the budget; about the ratio of the stated sizes.
      oversize: skip leaves out a scale that is larger than the capacity, as printed; fill keeps as
        many of its newest tokens as still fit. auto: skip for given sizes; fill for a budget, which
        a literal reading can leave largely unused.

    Differs from the paper, or reads it so:
      - Condensed scales are subtracted from token sizes, so they are counted in tokens (5 for 1x1
        and 2x2), and a scale may be kept in part.
      - Attention comes before rolling: a scale sees itself and what was held before, and the last
        scale is never stored. The published memory counts what Algorithm 1 holds after the last
        scale, N * Cmax + (L - N) * Cmin; `experiments.plan` prints that and ours, the peak.
      - The stated sizes (the last two scales or the penultimate one, plus the condensed) do not
        give the published memory. The presets are the only scale-aligned sizes that do, given one
        stated capacity.
      - Tokens evicted before a layer turns demanding do not return. No test at the first scale.
      - The ablations of Tables 1, 2 and 7 are `table` files and plain arguments:
        docs/howto/reproduce.md.
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
    theta: float = within(0.0, -1e9, 0, note=NEGATIVE)
    ratio: float = within(2.5, 1, 1e6, note=": Cmax is at least Cmin, choose 1 or more")
    oversize: str = "auto"

    selection_arguments = ("condensed", "condensed_tokens")
    unsuited = "it keeps the condensed and the newest scales"
    summary = "condensed and newest scales, more in layers whose keys change; needs a calibration"
    smallest_reason = "every layer needs room for its condensed scales and one more token"
    contents = "known beforehand, or per image"
    examples = ({}, {"mode": "online"})

    @property
    def needs(self) -> Needs:
        return Needs(key_similarity=self._online)

    @property
    def budgeted(self) -> bool:
        """Whether sizes follow from the budget."""
        return not (self.cmax or self.preset)

    shrinks = budgeted

    @property
    def uses_calibration(self) -> bool:
        """Whether measurements say which layers are demanding; if not, an argument does."""
        return not (self.theta if self._online else self.layers)

    @property
    def _online(self) -> bool:
        return self.mode == "online"

    @property
    def _discrepancy(self) -> np.ndarray | None:
        """float64 [L, K], if it was measured."""
        found = getattr(self._calibration, "key_discrepancy", None)
        return None if found is None else np.asarray(found)

    @property
    def _fill(self) -> bool:
        return self.oversize == "fill" or (self.oversize == "auto" and not self.cmax)

    # --- arguments --------------------------------------------------------------------------------

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "AMSKV":
        if calibration is not None:
            calibration.check(geometry)
        values = rules.preset_values(self, geometry) if self.preset else {}
        policy = dataclasses.replace(self, preset="", _calibration=calibration, **values)
        rules.check(policy, geometry)
        policy = policy._with_layers(geometry, guess=bool(self.preset))
        if policy.budgeted:
            return policy
        allocation = policy.allocate(geometry, 1.0)
        if isinstance(self.budget, NotGiven):  # then it is what the sizes cost
            budget = planner.cost(geometry, allocation, self.block_size)
            return dataclasses.replace(policy, budget=budget)
        sizes, peak = f"cmin={policy.cmin}, cmax={policy.cmax}", allocator.peak_tokens
        policy.refuse_more(geometry, policy.budget, peak(geometry, allocation), sizes)
        return policy

    # --- demanding layers -------------------------------------------------------------------------

    def _with_layers(self, geometry: Geometry, guess: bool) -> "AMSKV":
        """The policy with its demanding layers named, or in online mode with theta. Where layers
        were measured, theta is half way between the `demanding` least similar ones and the others.

        guess: without a calibration take the first layers. If nothing says which layers, none are
        named and `_below` complains; for a `select` of `compose` nobody asks it.
        """
        layers, mean = geometry.num_layers, self._discrepancy
        if mean is not None:  # of each layer, over the scales that have one before them
            mean = mean[:, 1:].sum(1) / max(1, mean.shape[1] - 1)
        number = self.demanding if self.demanding >= 0 else max(1, round(layers / 4))
        if not self._online:
            guess = guess and self._calibration is None
            known = mean is not None or number in (0, layers) or guess
            if self.layers or self.theta or not known:
                return self
            order = np.arange(layers) if mean is None else np.argsort(-mean, kind="stable")
            names = ";".join(map(str, np.sort(order[:number]))) or "none"
            return dataclasses.replace(self, layers=names, demanding=number)
        if self.demanding >= 0 and (self.theta or mean is None):
            self.refuse(
                f"mode=online: demanding={self.demanding} can only choose theta, and needs a "
                f"calibration with key_discrepancy and no theta for that; leave it out"
            )
        theta = self.theta or UNIT_KEYS_THRESHOLD
        if mean is not None and not self.theta:
            bounds = np.concatenate([[0.0], np.sort(mean), [2 * mean.max() + 1]])
            theta = -float(bounds[layers - number :][:2].mean())
        return dataclasses.replace(self, theta=theta, demanding=-1)

    def _below(self, geometry: Geometry) -> np.ndarray:
        """bool [L, K]: where the similarity test of Algorithm 1 finds a demanding layer."""
        if self.layers:
            named = rules.named_layers(self, geometry.num_layers)
            below = np.isin(np.arange(geometry.num_layers), named)[:, None]
            return np.repeat(below, geometry.schedule.num_scales, axis=1)
        if not self.theta or self._discrepancy is None:
            self.refuse(
                f"which layers are demanding is measured on the model: give {CALIBRATE} with "
                f"key_discrepancy, or name them (layers=0;3;5), or choose mode=online"
            )
        below = -self._discrepancy < self.theta
        below[:, 0] = False
        return below

    def _wide(self, geometry: Geometry, sizes: rules.Sizes) -> np.ndarray:
        """bool [L]: layers that may end with Cmax."""
        if self._online:
            return np.ones(geometry.num_layers, bool)
        return sizes.wide(geometry.schedule.tokens, self._below(geometry))

    # --- sizes and contents -----------------------------------------------------------------------

    def locked_tokens(self, geometry: Geometry, cmin: int) -> int:
        """Tokens of the condensed scales beside a Cmin."""
        first = geometry.schedule.starts  # first[n]: tokens of the first n scales
        given = first[self.condensed] if self.condensed >= 0 else self.condensed_tokens
        if given >= 0:
            return given
        automatic = first[: CONDENSED_SCALES + 1]
        return automatic[-1] if self.cmax else max(n for n in automatic if n <= cmin / 2)

    def minimum_budget(self, geometry: Geometry) -> float:
        least = 1 + self.locked_tokens(geometry, 0)
        return min(1.0, least / max(1, geometry.schedule.persistent_tokens))

    def sizes(self, geometry: Geometry, budget: float) -> rules.Sizes:
        """Cmin and Cmax as given or as a budget leads to them, and what goes with them."""
        least = 1 + self.locked_tokens(geometry, 0)

        def sizes_for(demanding: int | None) -> rules.Sizes:
            cmin, cmax = self.cmin, self.cmax
            if not cmax:
                cmin, cmax = rules.divide(geometry, budget, demanding, least, self.ratio)
            locked = self.locked_tokens(geometry, cmin)
            return rules.Sizes(cmin=cmin, cmax=cmax, condensed=locked, fill=self._fill)

        if self.cmax or self._online:
            return sizes_for(None)
        below, stored = self._below(geometry)[:, :-1], geometry.schedule.tokens[:-1]
        number = int(below.any(1).sum())
        found = sizes_for(number)
        while self.theta:  # layers that Algorithm 1 does not come to test leave more to others
            fewer = int(found.wide(stored, below).sum())
            better = sizes_for(fewer)
            if fewer >= number or int(better.wide(stored, below).sum()) > fewer:
                break
            number, found = fewer, better
        return found

    def allocate(self, geometry: Geometry, budget: float) -> Allocation:
        schedule, sizes = geometry.schedule, self.sizes(geometry, budget)
        if self._online:
            recent = min(sizes.cmin, schedule.persistent_tokens) - sizes.condensed
            held = capacities.capacity(geometry, sizes.cmax)
            return RegionAllocation(held, ragged=True, protected=sizes.condensed, recent=recent)
        below = self._below(geometry)
        kinds, kind_of_layer = np.unique(below, axis=0, return_inverse=True)
        held = np.stack([sizes.contents(schedule.tokens, kind)[0] for kind in kinds])
        last_use = (schedule.scale_of_token + held[:, :-1].sum(1)).astype(np.int16)
        last_use = last_use[kind_of_layer.reshape(-1), None]
        shape = (geometry.num_layers, geometry.num_heads, schedule.total_tokens)
        return StaticAllocation(np.broadcast_to(last_use, shape))

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> RegionAllocation:
        """Condensed and newest tokens (CLRU) in capacities that another policy has decided."""
        locked = self.locked_tokens(geometry, capacities.uniform(geometry, budget))
        recent = geometry.schedule.persistent_tokens
        return RegionAllocation(capacity, protected=locked, recent=recent)

    # --- what a printed plan says -----------------------------------------------------------------

    def steady_tokens(self, geometry: Geometry) -> int:
        sizes = self.sizes(geometry, self.budget)
        wide = self._wide(geometry, sizes)
        return int(np.where(wide, sizes.cmax, sizes.cmin).sum())

    def plan_lines(self, geometry: Geometry) -> list[str]:
        sizes = self.sizes(geometry, self.budget)
        rounded = "" if self.cmax else " (before rounding to blocks)"
        rest = f"{sizes.condensed} of them condensed{rounded}"
        if self._online:
            theta = f"{self.theta:g}"
            lines = [
                f"layers    demanding ones are found while generating (similarity below {theta}), "
                f"so every layer is planned with Cmax"
            ]
            if isinstance(self.theta, NotGiven):
                lines.append(
                    f"theta     {theta} is assumed, for keys of norm 1; if this model does not "
                    f"normalise its keys, calibrate it or give theta="
                )
            return [*lines, f"sizes     Cmin {sizes.cmin}, Cmax {sizes.cmax} tokens, {rest}"]
        if sizes.cmin == sizes.cmax:
            return [f"sizes     {sizes.cmin} tokens in every layer, {rest}"]
        named = np.flatnonzero(self._wide(geometry, sizes)).tolist()
        return [
            f"layers    demanding: {' '.join(map(str, named)) or 'none'}",
            f"sizes     Cmax {sizes.cmax} tokens in {len(named)} of {geometry.num_layers} layers, "
            f"Cmin {sizes.cmin} in the others, {rest}",
        ]

    # --- device -----------------------------------------------------------------------------------

    def inputs(self, geometry: Geometry, allocation: Allocation, image_index: np.ndarray):
        """int32 [K, L, 4]: Cmin, Cmax, condensed tokens, and whether oversize scales fill what is
        left; None for static contents."""
        if not isinstance(allocation, RegionAllocation):
            return None
        cmin = allocation.protected + allocation.recent
        cmax = max(cmin, int(allocation.region_capacity.max(initial=0)))
        fill = self._fill or allocation.recent >= geometry.schedule.persistent_tokens  # adopted
        return per_layer(geometry, np.array([cmin, cmax, allocation.protected, fill], np.int32))

    def init_state(self, geometry: Geometry, rows: int):
        """bool [R], whether the layer is demanding."""
        return np.zeros(rows, bool) if self._online else None

    def update_state(self, obs: Observation):
        if not self._online:
            return obs.state
        cmin, cmax, _, fill = obs.inputs
        new, held = (obs.live & obs.own)[:, 0].sum(-1), obs.live[:, 0].sum(-1)
        exhausted = (held > cmin) & ((new <= cmax) | (fill > 0)) & (obs.scale > 0)
        return obs.state | (exhausted & (obs.key_similarity < self.theta))

    def select(self, obs: Observation):
        """Condensed tokens are locked (`rules.Sizes`), and stored ones stay before an oversize
        scale."""
        cmin, cmax, condensed, fill = obs.inputs
        demanding = False if obs.state is None else obs.state[:, None]
        capacity = jnp.minimum(jnp.where(demanding, cmax, cmin), obs.capacity)
        condensed, fill, own = jnp.minimum(condensed, capacity), fill > 0, obs.live & obs.own
        oversize = (own.sum(-1) > capacity)[..., None]
        among = obs.live & ~(own & oversize & ~fill)
        age = obs.position.astype(jnp.float32)
        locked = blocks.top(-age, among, condensed)
        stored_first = 1.0 * (~obs.own & oversize) + 2.0 * locked
        return blocks.top(age + stored_first * POSITIONS, among, capacity)
