"""The knapsack: of the attention that calibration has measured, as much as the budget holds."""

from dataclasses import dataclass, field, replace

import numpy as np

from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry, StaticAllocation
from varjax.core.policy import Policy
from varjax.policies.last_uses import best_last_uses
from varjax.policies.registry import register
from varjax.policies.scale_rule import CONTENTS_FOLLOW, ScaleRule, measured

LAST_LAYER = 0.85  # what mass is worth in the last layer, 1 in the first, evenly between


class KnapsackScales(ScaleRule):
    """Which head sees which scale for how long, from the measured attention of scales."""

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Knapsack":
        measured(self.policy, calibration, "beta", geometry, what="where heads look")
        return replace(self.policy, _calibration=calibration)

    def check(self, geometry: Geometry) -> None:
        stored = geometry.schedule.num_scales - 1
        self.policy.require("sinks", 0 <= self.policy.sinks <= stored, f": choose 0 to {stored}")

    def minimum_budget(self, geometry: Geometry) -> float:
        """The sink scales in every head, or one token in all."""
        tokens = geometry.schedule.starts[self.policy.sinks] * geometry.num_heads
        least = max(1, tokens * geometry.num_layers)
        return least / max(1, geometry.dense_tokens)

    def allocate(self, geometry: Geometry, budget: float) -> StaticAllocation:
        beta, schedule = np.asarray(self.policy._calibration.beta, np.float64), geometry.schedule
        weight = np.linspace(1, LAST_LAYER, geometry.num_layers)[:, None, None]
        stored = np.arange(schedule.num_scales - 1)
        size = np.array(schedule.tokens)[stored]
        last_use = best_last_uses(
            np.moveaxis(beta, 2, 0)[..., stored] * weight,
            stored,
            size,
            int(budget * geometry.dense_tokens + 1e-6),
            fixed=stored < self.policy.sinks,
        )
        # the last scale is never stored
        end = np.full((*last_use.shape[:2], 1), schedule.num_scales - 1)
        by_scale = np.concatenate([last_use, end], axis=-1).astype(np.int16)
        return StaticAllocation(np.repeat(by_scale, schedule.tokens, axis=-1))


@register("knapsack")
@dataclass(frozen=True, kw_only=True)
class Knapsack(Policy):
    """The most measured attention that fits the budget; varjax's own.

    Idea: what a head sees of a scale hardly depends on the image, and the order of scales is fixed.
    So calibration says beforehand how much attention mass each head would lose without each scale,
    and what to keep, and how long, is a knapsack.

    1. Worth: beta[k, j] of a head, the attention mass of scale k on scale j, averaged over queries
       and samples. Keeping scale j up to scale u is worth beta[j + 1, j] + ... + beta[u, j]; a
       little less in later layers, since what a layer misses goes through all layers behind it.
    2. Cost: the tokens of scale j, in all scales from j + 1 to u.
    3. Budget: after every layer of every scale all heads of all layers together hold at most
       b * F * L * N tokens.
    4. The last uses of greatest worth within the budget, by prices for each (scale, layer) and a
       search (`varjax.policies.last_uses`): at least 99 % of the optimum of an integer programme
       on the embedded models, from 5 % on.

    Needs a calibration that holds beta.

    Args:
      budget: fraction of the full cache, kept after every layer of every scale.
      sinks: first scales that are never dropped (0: none; what is worth keeping stays anyway).

    Differs from `heatkv`, which measures the same, by a search for the best allocation in place of
    a schedule: HeatKV orders heads by the mean of beta over later scales, takes the same number of
    heads from every source scale, removes early only what layers need, and protects sinks. Here
    every (head, scale) has a last use of its own, small scales cost less than large ones, and
    nothing is protected. Not from a paper.
    """

    budget: float = 0.1
    sinks: int = 0
    _calibration: Calibration | None = field(default=None, repr=False, compare=False)

    rules = (KnapsackScales,)
    unfit_roles = {"select": f"{CONTENTS_FOLLOW} knapsack of scales"}
    unsuited = "its items are whole scales"
    summary = (
        "per head the scales with most measured attention for their bytes; needs a calibration"
    )
    smallest_reason = "the sink scales alone need more"
    uses_calibration = True
