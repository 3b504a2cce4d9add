"""AMS-KV: condensed and newest scales, more of them in layers whose keys change."""

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from varjax.calibration.data import Calibration
from varjax.core import masks
from varjax.core.allocation import Geometry
from varjax.core.arguments import within
from varjax.core.observation import Needs, Observation
from varjax.core.policy import Policy
from varjax.policies.amskv_rules import AMSKVScales, Sizes, divide, named_layers
from varjax.policies.registry import register
from varjax.policies.scale_rule import CALIBRATE, NotGiven

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
    _calibration: Calibration | None = field(default=None, repr=False, compare=False)

    rules = (AMSKVScales,)
    selection_arguments = ("condensed", "condensed_tokens")
    unsuited = "it keeps the condensed and the newest scales"
    summary = "condensed and newest scales, more in layers whose keys change; needs a calibration"
    smallest_reason = "every layer needs room for its condensed scales and one more token"
    contents = "known beforehand, or per image"
    examples = ({}, {"mode": "online"})

    @property
    def needs(self) -> Needs:
        return Needs(key_similarity=self.online)

    @property
    def budgeted(self) -> bool:
        """Whether sizes follow from the budget."""
        return not (self.cmax or self.preset)

    shrinks = budgeted

    @property
    def uses_calibration(self) -> bool:
        """Whether measurements say which layers are demanding; if not, an argument does."""
        return not (self.theta if self.online else self.layers)

    @property
    def online(self) -> bool:
        return self.mode == "online"

    @property
    def _discrepancy(self) -> np.ndarray | None:
        """float64 [L, K], if it was measured."""
        found = getattr(self._calibration, "key_discrepancy", None)
        return None if found is None else np.asarray(found)

    @property
    def fill(self) -> bool:
        return self.oversize == "fill" or (self.oversize == "auto" and not self.cmax)

    # --- demanding layers -------------------------------------------------------------------------

    def with_layers(self, geometry: Geometry, guess: bool) -> "AMSKV":
        """The policy with its demanding layers named, or in online mode with theta. Where layers
        were measured, theta is half way between the `demanding` least similar ones and the others.

        guess: without a calibration take the first layers. If nothing says which layers, none are
        named and `below` complains; for a `select` of `compose` nobody asks it.
        """
        layers, mean = geometry.num_layers, self._discrepancy
        if mean is not None:  # of each layer, over the scales that have one before them
            mean = mean[:, 1:].sum(1) / max(1, mean.shape[1] - 1)
        number = self.demanding if self.demanding >= 0 else max(1, round(layers / 4))
        if not self.online:
            guess = guess and self._calibration is None
            known = mean is not None or number in (0, layers) or guess
            if self.layers or self.theta or not known:
                return self
            order = np.arange(layers) if mean is None else np.argsort(-mean, kind="stable")
            names = ";".join(map(str, np.sort(order[:number]))) or "none"
            return replace(self, layers=names, demanding=number)
        if self.demanding >= 0 and (self.theta or mean is None):
            self.refuse(
                f"mode=online: demanding={self.demanding} can only choose theta, and needs a "
                f"calibration with key_discrepancy and no theta for that; leave it out"
            )
        theta = self.theta or UNIT_KEYS_THRESHOLD
        if mean is not None and not self.theta:
            bounds = np.concatenate([[0.0], np.sort(mean), [2 * mean.max() + 1]])
            theta = -float(bounds[layers - number :][:2].mean())
        return replace(self, theta=theta, demanding=-1)

    def below(self, geometry: Geometry) -> np.ndarray:
        """bool [L, K]: where the similarity test of Algorithm 1 finds a demanding layer."""
        if self.layers:
            named = named_layers(self, geometry.num_layers)
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

    def wide(self, geometry: Geometry, sizes: Sizes) -> np.ndarray:
        """bool [L]: layers that may end with Cmax."""
        if self.online:
            return np.ones(geometry.num_layers, bool)
        return sizes.wide(geometry.schedule.tokens, self.below(geometry))

    # --- sizes and contents -----------------------------------------------------------------------

    def locked_tokens(self, geometry: Geometry, cmin: int) -> int:
        """Tokens of the condensed scales beside a Cmin."""
        first = geometry.schedule.starts  # first[n]: tokens of the first n scales
        given = first[self.condensed] if self.condensed >= 0 else self.condensed_tokens
        if given >= 0:
            return given
        automatic = first[: CONDENSED_SCALES + 1]
        return automatic[-1] if self.cmax else max(n for n in automatic if n <= cmin / 2)

    def sizes(self, geometry: Geometry, budget: float) -> Sizes:
        """Cmin and Cmax as given or as a budget leads to them, and what goes with them."""
        least = 1 + self.locked_tokens(geometry, 0)

        def sizes_for(demanding: int | None) -> Sizes:
            cmin, cmax = self.cmin, self.cmax
            if not cmax:
                cmin, cmax = divide(geometry, budget, demanding, least, self.ratio)
            locked = self.locked_tokens(geometry, cmin)
            return Sizes(cmin=cmin, cmax=cmax, condensed=locked, fill=self.fill)

        if self.cmax or self.online:
            return sizes_for(None)
        below, stored = self.below(geometry)[:, :-1], geometry.schedule.tokens[:-1]
        number = int(below.any(1).sum())
        found = sizes_for(number)
        while self.theta:  # layers that Algorithm 1 does not come to test leave more to others
            fewer = int(found.wide(stored, below).sum())
            better = sizes_for(fewer)
            if fewer >= number or int(better.wide(stored, below).sum()) > fewer:
                break
            number, found = fewer, better
        return found

    def select(self, obs: Observation):
        """Condensed tokens are locked, and stored ones stay before an oversize scale."""
        cmin, cmax, condensed, fill = obs.inputs
        demanding = False if obs.state is None else obs.state[:, None]
        capacity = jnp.minimum(jnp.where(demanding, cmax, cmin), obs.capacity)
        condensed, fill, own = jnp.minimum(condensed, capacity), fill > 0, obs.live & obs.own
        oversize = (own.sum(-1) > capacity)[..., None]
        among = obs.live & ~(own & oversize & ~fill)
        age = obs.position.astype(jnp.float32)
        locked = masks.top(obs, -age, among, condensed)
        stored_first = 1.0 * (~obs.own & oversize) + 2.0 * locked
        return masks.top(obs, age + stored_first * POSITIONS, among, capacity)
