"""HACK: contextual heads keep what is attended to, structural heads what is near."""

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from varjax.calibration.data import Calibration
from varjax.core import masks
from varjax.core.allocation import Geometry, RegionAllocation
from varjax.core.arguments import within
from varjax.core.observation import Needs, Observation
from varjax.policies import capacities
from varjax.policies.registry import register
from varjax.policies.scale_rule import ScaleRule, measured, per_layer
from varjax.policies.windows import SinkPolicy, SinkScales


class HACKScales(SinkScales):
    """Capacities of contextual and structural heads."""

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "HACK":
        variance = measured(self.policy, calibration, "query_variance", geometry, what="the heads")
        order = np.argsort(variance.ravel(), kind="stable")
        chosen = np.zeros(variance.size, bool)
        chosen[order[: int(self.policy.contextual * variance.size + 0.5)]] = True
        types = tuple(map(tuple, chosen.reshape(variance.shape).tolist()))
        return replace(self.policy, _types=types)

    def minimum_budget(self, geometry: Geometry) -> float:
        return max(super().minimum_budget(geometry), ScaleRule.minimum_budget(self, geometry))

    def allocate(self, geometry: Geometry, budget: float) -> RegionAllocation:
        protected, full = self.protected(geometry, budget), geometry.schedule.persistent_tokens
        per_head = capacities.apportion(
            capacities.total(geometry, budget),
            np.where(np.array(self.policy._types), 1.0, self.policy.asymmetry),
            lower=min(full, max(1, protected)),
            upper=full,
        )
        return RegionAllocation(capacities.capacity(geometry, per_head), protected=protected)

    def inputs(self, geometry: Geometry, allocation: RegionAllocation, image_index: np.ndarray):
        """Per scale and layer: which heads are contextual, bool [K, L, N], and the protected
        tokens, int32 [K, L]."""
        shape = (geometry.schedule.num_scales, geometry.num_layers, geometry.num_heads)
        contextual = np.broadcast_to(np.array(self.policy._types), shape)
        return contextual, per_layer(geometry, np.int32(allocation.protected))


@register("hack")
@dataclass(frozen=True, kw_only=True)
class HACK(SinkPolicy):
    """HACK ("Head-Aware KV Cache Compression for Efficient Visual Autoregressive Modeling", Qin et
    al.).

    Idea: in contextual heads all queries look at the same few keys (vertical stripes in the
    attention map); in structural heads every query looks at its own surroundings (diagonals). Which
    head is which depends on the model only. So each kind gets its own eviction rule and its own
    capacity.

    1. Offline: var[l, n] = sum over keys of the variance over queries of their attention, averaged
       over scales and samples. Stripes vary little from query to query, diagonals much. The
       `contextual` fraction of the model's heads with the lowest values is contextual, the others
       are structural.
    2. Capacities: a structural head gets `asymmetry` times as much as a contextual one, at most F,
       at least the sinks; together floor(budget * F * L * N) tokens.
    3. After every scale, in each head that holds more than its capacity: the sink scales stay;
       contextual heads fill up with the tokens of most attention mass, averaged over all
       queries of the scale just generated; structural heads with the newest tokens in raster order.

    Needs a calibration that holds the variances of the heads.

    Args:
      budget: fraction of the full cache.
      sinks: scales that are never dropped; 3 in HeatKV's runs. 0 takes up to 3, as many as fit half
        of the mean capacity.
      contextual: fraction of contextual heads among all heads of the model (0.75).
      asymmetry: capacity of a structural head relative to a contextual one.

    The texts that we follow name a variance-aware statistic, two budgets, two eviction rules and
    the sinks, but give neither formulas nor numbers. So this is our reading:
      - The statistic is the one above. A quantile over the whole model separates the kinds, so
        layers may differ in how many contextual heads they have. Three in four are contextual:
        measured on the embedded demo (docs/lab/demo_policies.md), halves are clearly further from
        the full cache.
      - Structural heads get the larger capacity: their mass lies on many tokens, that of stripes on
        few. Twice as large is a guess.
      - All queries of the current scale judge what is attended, anew after every scale. "Near" is
        the newest tokens, in which every place of the image is at most once per scale.
    """

    budget: float = 0.25
    contextual: float = within(0.75, 0, 1)
    asymmetry: float = within(2.0, 0.01, 100)
    _types: tuple[tuple[bool, ...], ...] = field(default=(), repr=False)  # [L][N], True: contextual

    rules = (HACKScales,)
    selection_arguments = ("sinks", "contextual")
    unsuited = "its statistic compares the queries of a scale, and there is one query at a time"
    summary = "per head kind the most attended or the newest tokens; needs a calibration"
    needs = Needs(scale_mass=True)
    uses_calibration = True

    def select(self, obs: Observation):
        contextual, protected = obs.inputs
        first = obs.live & (obs.position < protected)
        sinks = masks.oldest(obs, first, obs.capacity)
        score = jnp.where(contextual[:, None], obs.scale_mass, obs.position.astype(jnp.float32))
        rest = obs.capacity - sinks.sum(-1)
        return sinks | masks.top(obs, score, obs.live & ~sinks, rest)
