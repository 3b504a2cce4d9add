"""How many leading scales a policy never drops."""

from dataclasses import dataclass

from varjax.cache.allocation import Geometry
from varjax.errors import UserError
from varjax.policies.base import Policy

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
