"""Policies whose contents follow from positions alone: full cache, sliding window, StreamingLLM;
and sink scales, the leading ones that a policy never drops."""

from dataclasses import dataclass

import numpy as np

from varjax.cache.allocation import Geometry, StaticAllocation
from varjax.cache.stages import StageAllocation
from varjax.errors import UserError
from varjax.policies import capacities
from varjax.policies.base import Policy
from varjax.policies.registry import register
from varjax.policies.staged import TokenPolicy

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


@dataclass(frozen=True, kw_only=True)
class RingPolicy(TokenPolicy):
    """Base of policies whose contents are known on models that draw token by token: the condition,
    the first `sinks` image tokens, and a ring of slots through which the others go, so that every
    token sees exactly as many of the newest as the ring has slots, itself included.

    A `period` changes nothing there; it is taken so that the same arguments suit all policies.
    """

    decides = False
    stay_first = 0  # image tokens

    def stay_always(self, geometry: Geometry) -> int:
        return self.stay_first + 1

    def allocate_stages(self, geometry: Geometry, slots: int) -> StageAllocation:
        return StageAllocation.known(geometry, slots, self.stay_first)


@register("full")
@dataclass(frozen=True, kw_only=True)
class Full(RingPolicy):
    """Keep every token. The yardstick of the others; the last scale, or the last token of models
    that draw token by token, is not stored (nothing reads it). `period` has no effect."""

    summary = "everything"
    shrinks = False
    smallest_reason = "it keeps everything"

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> StaticAllocation:
        return newest_and_sinks(geometry, geometry.schedule.total_tokens, 0)

    def minimum_budget(self, geometry: Geometry) -> float:
        return 1.0

    def stay_always(self, geometry: Geometry) -> int:
        return geometry.schedule.steps

    def least(self, geometry: Geometry) -> str:
        return self.smallest_reason


@register("swa")
@dataclass(frozen=True, kw_only=True)
class SlidingWindow(RingPolicy):
    """Sliding-window attention: every head keeps the newest tokens, no sinks.

    Idea: locality. A baseline of AMS-KV (its comparison runs). The window is floor(budget * F)
    tokens in every head and layer, counted backwards from the last token stored, in raster order,
    so a scale may be cut in two. Queries always see all of their own scale.

    On models that draw token by token the condition stays, as under every policy, and the newest
    image tokens; that is `streaming` without sinks. `period` has no effect.

    Differs from AMS-KV's runs, which give only "compression ratio 75 %": token granularity is our
    reading.
    """

    budget: float = 0.25
    summary = "newest tokens only"

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> StaticAllocation:
        return newest_and_sinks(geometry, capacities.uniform(geometry, budget), 0)


@register("streaming")
@dataclass(frozen=True, kw_only=True)
class Streaming(RingPolicy, SinkPolicy):
    """StreamingLLM (Xiao et al. 2023), as HeatKV and AMS-KV ("STA") run it on next-scale models.

    Every head keeps the sink scales and the newest tokens; the budget left by the sinks is the
    window, uniform over heads.

    Args:
      sinks: scales that are never dropped. 3 is what HeatKV uses on Infinity; 0 (default) takes up
        to 3, as many as fit half of the budget, so that small schedules keep a window. On models
        that draw token by token: image tokens that stay from the first on; 0 (default) is none,
        the condition being the sink.
      period: has no effect; see `RingPolicy`.

    On models that draw token by token keys keep the rotation of their place in the image (the
    original turns them by their place in the cache, which means nothing in two dimensions).

    Differs from the original, which keeps four sink *tokens* of a text: here sinks are whole
    scales, which hold the image's layout.
    """

    budget: float = 0.25
    allocation_arguments = ()  # what sinks take the window loses
    summary = "sink scales (or the condition) and newest tokens"

    @property
    def stay_first(self) -> int:
        return self.sinks

    def check_stage_arguments(self, geometry: Geometry) -> None:
        super().check_stage_arguments(geometry)
        most = max(1, geometry.schedule.steps - 1)
        self.require("sinks", 0 <= self.sinks <= most, f" must be 0 to {most}")

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> StaticAllocation:
        protected = self.protected(geometry, budget)
        window = capacities.uniform(geometry, budget) - protected
        return newest_and_sinks(geometry, window, protected)
