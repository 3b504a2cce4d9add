"""Policies whose contents follow from positions alone: full cache, sliding window, StreamingLLM;
and sink scales, the leading ones that a policy never drops."""

from dataclasses import dataclass

import numpy as np

from varjax.core import masks
from varjax.core.allocation import (
    Allocation,
    Geometry,
    RegionAllocation,
    StageAllocation,
    StaticAllocation,
)
from varjax.core.observation import Observation
from varjax.core.policy import Policy
from varjax.policies import capacities
from varjax.policies.registry import register
from varjax.policies.scale_rule import ScaleRule, per_layer
from varjax.policies.token_rule import StagedPolicy, TokenRule

MOST_AUTOMATIC_SINKS = 3  # what StreamingLLM, HACK and HeatKV use on Infinity


@dataclass(frozen=True, kw_only=True)
class SinkPolicy(Policy):
    """Base of policies that never drop the first `sinks` steps. A step is what the model draws at a
    time: a scale (0: as many scales as the budget suggests, see `SinkScales.sink_scales`) or an
    image token."""

    sinks: int = 0

    smallest_reason = "the sink scales alone need more"


class SinkScales(ScaleRule):
    """Base of rules that never drop the first scales; the policy is a `SinkPolicy`."""

    def check(self, geometry: Geometry) -> None:
        stored = geometry.schedule.num_scales - 1
        if self.policy.sinks and not 0 <= self.policy.sinks <= stored:
            self.policy.refuse(
                f"sinks={self.policy.sinks}: choose 1 to {stored} scales, or 0 to let the budget "
                f"decide"
            )

    def sink_scales(self, geometry: Geometry, budget: float) -> int:
        """The number of sink scales: as given, or (0) up to three as long as they take at most half
        of a head's mean budget."""
        if self.policy.sinks:
            return self.policy.sinks
        schedule = geometry.schedule
        stored, half = schedule.num_scales - 1, budget * schedule.persistent_tokens / 2
        fitting = sum(end <= half for end in schedule.ends[: min(MOST_AUTOMATIC_SINKS, stored)])
        return max(fitting, min(1, stored))

    def protected(self, geometry: Geometry, budget: float) -> int:
        """Tokens of the sink scales."""
        return geometry.schedule.starts[self.sink_scales(geometry, budget)]

    def minimum_budget(self, geometry: Geometry) -> float:
        """The budget at which only the sink scales fit (one scale if the number is left open)."""
        schedule = geometry.schedule
        tokens = schedule.starts[self.policy.sinks or min(1, schedule.num_scales - 1)]
        return tokens / max(1, schedule.persistent_tokens)

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> RegionAllocation:
        return RegionAllocation(capacity, protected=self.protected(geometry, budget))


def newest_and_sinks(geometry: Geometry, window: int, protected: int) -> StaticAllocation:
    """Every head sees the first `protected` tokens and the newest `window` of the rest."""
    schedule = geometry.schedule
    token = np.arange(schedule.total_tokens)
    starts = np.array(schedule.starts)[:, None]
    exists = token < starts
    visible = exists & ((token < protected) | (token >= starts - window))
    return StaticAllocation.from_visibility(geometry, visible[:, None, None])


class Ring(TokenRule):
    """Contents that are known on models that draw token by token: the condition, the first
    `stay_first` image tokens (its policy's `sinks`), and a ring of slots through which the others
    go, so that every token sees as many of the newest as the ring has slots, itself included.

    A `period` changes nothing here; it is taken so that the same arguments suit all policies.
    """

    decides = False

    @property
    def stay_first(self) -> int:
        return getattr(self.policy, "sinks", 0)

    def check(self, geometry: Geometry) -> None:
        super().check(geometry)
        most = max(1, geometry.schedule.steps - 1)
        if self.stay_first:
            self.policy.require("sinks", 0 <= self.stay_first <= most, f" must be 0 to {most}")

    def stay_always(self, geometry: Geometry) -> int:
        return self.stay_first + 1

    def allocate(self, geometry: Geometry, budget: float) -> StageAllocation:
        return StageAllocation.known(geometry, self.slots(geometry, budget), self.stay_first)


class FullScales(ScaleRule):
    """Every head sees everything."""

    def minimum_budget(self, geometry: Geometry) -> float:
        return 1.0

    def allocate(self, geometry: Geometry, budget: float) -> StaticAllocation:
        return newest_and_sinks(geometry, geometry.schedule.total_tokens, 0)


class FullRing(Ring):
    """A ring with a slot for every image token."""

    def stay_always(self, geometry: Geometry) -> int:
        return geometry.schedule.steps

    def least(self, geometry: Geometry) -> str:
        return self.policy.smallest_reason


@register("full")
@dataclass(frozen=True, kw_only=True)
class Full(StagedPolicy):
    """Keep every token. The yardstick of the others; the last scale, or the last token of models
    that draw token by token, is not stored (nothing reads it). `period` has no effect."""

    rules = (FullScales, FullRing)
    unfit_roles = {
        "allocate": "it keeps everything, so there is nothing to select",
        "select": "it keeps everything; any other policy does that with budget 1",
    }
    summary = "everything"
    shrinks = False
    smallest_reason = "it keeps everything"


class NewestScales(ScaleRule):
    """The newest tokens of all behind the first `protected`."""

    def protected(self, geometry: Geometry, budget: float) -> int:
        """Tokens that are never dropped."""
        return 0

    def allocate(self, geometry: Geometry, budget: float) -> StaticAllocation:
        protected = self.protected(geometry, budget)
        window = capacities.uniform(geometry, budget) - protected
        return newest_and_sinks(geometry, window, protected)

    def inputs(self, geometry: Geometry, allocation: Allocation, image_index: np.ndarray):
        """int32 [K, L]: the protected tokens; None for static contents."""
        if isinstance(allocation, StaticAllocation):
            return None
        return per_layer(geometry, np.int32(allocation.protected))


class StreamingScales(SinkScales, NewestScales):
    """The newest tokens behind the sink scales."""


@dataclass(frozen=True, kw_only=True)
class NewestPolicy(StagedPolicy):
    """Base of policies that keep the newest tokens behind the first. In capacities that another
    policy has decided (`compose`) they choose on the device."""

    budget: float = 0.25

    sinks = 0
    rules = (NewestScales, Ring)
    contents = "known beforehand"

    def select(self, obs: Observation):
        # scale by scale the number of the first tokens follows from the budget (`inputs`)
        first = self.sinks if obs.inputs is None else obs.inputs
        return masks.first_and_newest(obs, first)


@register("swa")
@dataclass(frozen=True, kw_only=True)
class SlidingWindow(NewestPolicy):
    """Sliding-window attention: every head keeps the newest tokens, no sinks.

    Idea: locality. A baseline of AMS-KV (its comparison runs). The window is floor(budget * F)
    tokens in every head and layer, counted backwards from the last token stored, in raster order,
    so a scale may be cut in two. Queries always see all of their own scale.

    On models that draw token by token every head keeps the condition, as under every policy, and
    the newest image tokens. That is `streaming` without sinks. `period` has no effect.

    Differs from AMS-KV's runs, which give only "compression ratio 75 %": token granularity is our
    reading.
    """

    summary = "newest tokens only"


@register("streaming")
@dataclass(frozen=True, kw_only=True)
class Streaming(NewestPolicy, SinkPolicy):
    """StreamingLLM (Xiao et al. 2023), as HeatKV and AMS-KV ("STA") run it on next-scale models.

    Every head keeps the sinks and the newest tokens; the budget left by the sinks is the window,
    uniform over heads.

    Args:
      sinks: first steps that are never dropped. Next-scale models: scales. 3 is what HeatKV uses on
        Infinity; 0 (default) takes up to 3, as many as fit half of the budget, so that small
        schedules keep a window. Token by token: image tokens; 0 (default) is none, because the
        condition is the sink.
      period: has no effect; see `help(varjax.policies.windows.Ring)`.

    On models that draw token by token keys keep the rotation of their place in the image (the
    original turns them by their place in the cache, which means nothing in two dimensions).

    Differs from the original, which keeps four sink *tokens* of a text: on next-scale models sinks
    are whole scales, which hold the image's layout.
    """

    rules = (StreamingScales, Ring)
    allocation_arguments = ()  # what sinks take the window loses
    summary = "sink scales (or the condition) and newest tokens"
