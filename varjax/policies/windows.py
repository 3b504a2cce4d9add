"""Policies whose contents follow from positions alone: full cache, sliding window, StreamingLLM;
and sink scales, the leading ones that a policy never drops."""

from dataclasses import dataclass

import numpy as np

from varjax.cache.allocation import Geometry, StaticAllocation
from varjax.errors import UserError
from varjax.policies import capacities
from varjax.policies.base import Policy
from varjax.policies.registry import register

MOST_AUTOMATIC_SINKS = 3  # what StreamingLLM, HACK and HeatKV use on Infinity


def sink_scales(sinks: int, geometry: Geometry, budget: float) -> int:
    """The number of sink scales: as given, or (0) up to three as long as they take at most half of
    a head's mean budget."""
    if sinks:
        return sinks
    schedule = geometry.schedule
    stored, half = schedule.num_scales - 1, budget * schedule.persistent_tokens / 2
    fitting = sum(end <= half for end in schedule.ends[: min(MOST_AUTOMATIC_SINKS, stored)])
    return max(fitting, min(1, stored))


def minimum_budget(sinks: int, geometry: Geometry) -> float:
    """Budget at which only the sink scales fit (one scale when the number is left open)."""
    schedule = geometry.schedule
    tokens = schedule.starts[sinks or min(1, schedule.num_scales - 1)]
    return tokens / max(1, schedule.persistent_tokens)


@dataclass(frozen=True, kw_only=True)
class SinkPolicy(Policy):
    """Base of policies that never drop the first `sinks` scales (0: as many as the budget suggests,
    see `sink_scales`)."""

    sinks: int = 0

    smallest_reason = "the sink scales alone need more"

    def check_sinks(self, geometry: Geometry) -> None:
        stored = geometry.schedule.num_scales - 1
        if self.sinks and not 0 <= self.sinks <= stored:
            raise UserError(
                f"sinks={self.sinks}: choose 1 to {stored} scales, or 0 to let the budget decide"
            )

    def check(self, geometry: Geometry) -> None:
        self.check_sinks(geometry)
        super().check(geometry)

    def protected(self, geometry: Geometry, budget: float) -> int:
        """Tokens of the sink scales."""
        return geometry.schedule.starts[sink_scales(self.sinks, geometry, budget)]

    def minimum_budget(self, geometry: Geometry) -> float:
        return minimum_budget(self.sinks, geometry)


def newest_and_sinks(geometry: Geometry, window: int, protected: int) -> StaticAllocation:
    """Every head sees the first `protected` tokens and the newest `window` of the rest."""
    schedule = geometry.schedule
    token = np.arange(schedule.total_tokens)
    starts = np.array(schedule.starts)[:, None]
    exists = token < starts
    visible = exists & ((token < protected) | (token >= starts - window))
    return StaticAllocation.from_visibility(geometry, visible[:, None, None])


@register("full")
@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep every token. The yardstick of the others; the last scale is not stored (nothing reads
    it)."""

    summary = "everything"
    shrinks = False
    smallest_reason = "it keeps everything"

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> StaticAllocation:
        return newest_and_sinks(geometry, geometry.schedule.total_tokens, 0)

    def minimum_budget(self, geometry: Geometry) -> float:
        return 1.0


@register("swa")
@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Policy):
    """Sliding-window attention: every head keeps the newest tokens, no sinks.

    Idea: locality. A baseline of AMS-KV (its comparison runs). The window is floor(budget * F)
    tokens in every head and layer, counted backwards from the last token stored, in raster order,
    so a scale may be cut in two. Queries always see all of their own scale.

    Differs from AMS-KV's runs, which give only "compression ratio 75 %": token granularity is our
    reading.
    """

    budget: float = 0.25
    summary = "newest tokens only"

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> StaticAllocation:
        return newest_and_sinks(geometry, capacities.uniform(geometry, budget), 0)


@register("streaming")
@dataclass(frozen=True, kw_only=True)
class Streaming(SinkPolicy):
    """StreamingLLM (Xiao et al. 2023), as HeatKV and AMS-KV ("STA") run it on next-scale models.

    Every head keeps the sink scales and the newest tokens; the budget left by the sinks is the
    window, uniform over heads.

    Args:
      sinks: scales that are never dropped. 3 is what HeatKV uses on Infinity; 0 (default) takes up
        to 3, as many as fit half of the budget, so that small schedules keep a window.

    Differs from the original, which keeps four sink *tokens* of a text: here sinks are whole
    scales, which hold the image's layout.
    """

    budget: float = 0.25
    allocation_arguments = ()  # what sinks take the window loses
    summary = "sink scales and newest tokens"

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> StaticAllocation:
        protected = self.protected(geometry, budget)
        window = capacities.uniform(geometry, budget) - protected
        return newest_and_sinks(geometry, window, protected)
