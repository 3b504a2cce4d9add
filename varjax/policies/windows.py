"""Policies whose contents follow from positions alone: full cache, sliding window, StreamingLLM."""

from dataclasses import dataclass

import numpy as np

from varjax.cache.allocation import Geometry, StaticAllocation
from varjax.policies import capacities
from varjax.policies.base import Policy
from varjax.policies.registry import register
from varjax.policies.sinks import SinkPolicy


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
