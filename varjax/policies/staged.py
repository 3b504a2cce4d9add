"""What a policy does on models that draw token by token: rules about image tokens in stages
(`varjax.cache.stages`). The condition always stays and is nobody's candidate."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from varjax.cache.allocation import Geometry
from varjax.cache.observation import Needs, Observation
from varjax.cache.stages import StageAllocation, image_slots
from varjax.errors import UserError, show
from varjax.policies.base import Policy
from varjax.sequence import SCALES, TOKENS

LARGE = 128  # image slots of a head from which on a stage has 16 tokens, else 8
SHORT_STAGE, LONG_STAGE = 8, 16
STAGE_SHARE = 3  # an automatic stage takes at most a third of a head's image slots
HISTORY_SHARE = 6  # an automatic window leaves at least a sixth of what stays to history
SCORES = ("attention", "logit")  # mean attention, or mean scores before the softmax
LINES = 2  # "typically two rows" of the image


@dataclass(frozen=True, kw_only=True)
class TokenPolicy(Policy):
    """Base of policies that serve models that draw token by token: those that decide after every
    stage override `select_stage`.

    On such models every head of every layer has room for the condition and B image tokens, B =
    floor(budget * F) less the condition. The newest `period` of them (P) are a buffer, which
    counts. After every P tokens the policy chooses which B - P stay.

    Args:
      period: tokens between two decisions, on models that draw token by token. By default 8, or 16
        from B = 128 on, halved until it is at most a third of B.
    """

    period: int | None = None

    serves: ClassVar[tuple[str, ...]] = (SCALES, TOKENS)
    only_for: ClassVar[dict[str, tuple[str, ...]]] = {TOKENS: ("period",)}
    decides: ClassVar[bool] = True  # after every stage; else contents are known

    @property
    def stage_needs(self) -> Needs:
        """What `select_stage` wants to see."""
        return Needs()

    # --- host -------------------------------------------------------------------------------------

    def stage_start(self, geometry: Geometry) -> int:
        """The automatic period, if there is room for it."""
        room = image_slots(geometry, self.budget, self.accounting)
        return LONG_STAGE if room >= LARGE else SHORT_STAGE

    def prepare_stages(self, geometry: Geometry) -> "TokenPolicy":
        """This policy with what depends on the model and the budget filled in."""
        if self.period is not None:
            return self
        room = image_slots(geometry, self.budget, self.accounting)
        period = self.stage_start(geometry) if self.decides else 1
        while period > 1 and period * STAGE_SHARE > room:
            period = period // 2
        return dataclasses.replace(self, period=period)

    def check_stages(self, geometry: Geometry) -> None:
        """Raise `UserError` if the prepared policy cannot work on this model: for its arguments, or
        for a budget that is too small."""
        if self.accounting not in ("bytes", "tokens"):
            raise UserError(f"accounting={show(self.accounting)}: choose bytes or tokens")
        self.check_stage_arguments(geometry)
        lowest = self.minimum_share(geometry)
        if self.budgeted and self.budget < lowest - 1e-9:
            raise UserError(
                f"budget={self.budget:g} is too small for policy {self.name!r} on this model: "
                f"{self.least(geometry)}; the smallest feasible budget is "
                f"{np.ceil(lowest * 1e4) / 1e4:g}"
            )

    def check_stage_arguments(self, geometry: Geometry) -> None:
        """Raise `UserError` for arguments that no budget would make work."""
        most = max(1, geometry.schedule.steps - 1)
        self.require("period", 1 <= self.period <= most, f" must be 1 to {most}")

    def least(self, geometry: Geometry) -> str:
        """What a head holds at least, in words."""
        parts = [f"the condition ({geometry.schedule.condition})"]
        parts.append(f"what always stays ({self.stay_always(geometry)})")
        parts += [f"the buffer of a stage ({self.period})"] if self.decides else []
        return f"{', '.join(parts[:-1])} and {parts[-1]} take more tokens"

    def stay_always(self, geometry: Geometry) -> int:
        """Image tokens of a head that no decision drops, at least one."""
        return 1

    def minimum_slots(self, geometry: Geometry) -> int:
        """Image slots that a head needs at least."""
        steps = geometry.schedule.steps
        return min(steps, self.stay_always(geometry) + (self.period if self.decides else 0))

    def minimum_share(self, geometry: Geometry) -> float:
        """The smallest feasible budget."""
        sequence, needed = geometry.schedule, self.minimum_slots(geometry)
        if self.accounting == "tokens":
            return min(self.stay_always(geometry), sequence.steps) / sequence.image_tokens
        return (sequence.condition + needed) / sequence.persistent_tokens

    def wanted_slots(self, geometry: Geometry) -> int:
        """Image slots of a head that the budget pays for. Papers do not count the buffer."""
        room = image_slots(geometry, self.budget, self.accounting)
        return room + self.period if self.decides and self.accounting == "tokens" else room

    def allocate_stages(self, geometry: Geometry, slots: int) -> StageAllocation:
        """Who may hold how much, in so many image slots per head."""
        return StageAllocation.uniform(geometry, slots, self.period)

    def plan_lines(self, geometry: Geometry, calibration: Any = None) -> list[str]:
        if geometry.kind != TOKENS or not self.decides:
            return super().plan_lines(geometry, calibration)
        kept = f", the newest {self.window} always stay" if getattr(self, "window", None) else ""
        return [f"stages    a decision after every {self.period} tokens{kept}"]

    def stage_inputs(self, geometry: Geometry, image_index: np.ndarray) -> np.ndarray | None:
        """[L, stages that end with a decision, ...]: what `select_stage` wants of each layer and
        stage (`Observation.inputs`), for a batch of images; None if there is nothing."""
        return None

    # --- device -----------------------------------------------------------------------------------

    def local_heads(
        self, mass: Float[Array, "R N C"], position: Int[Array, "R N C"]
    ) -> Bool[Array, "R N"]:
        """Which heads are local from the allocation's `group_stage` on, from the attention of the
        newest query over everything that is held (positions count the condition; -1: empty)."""
        raise NotImplementedError

    @property
    def local_window(self) -> int | None:
        """Newest tokens that local heads see, the token itself included; None: no head is local."""
        return None

    def select_stage(self, obs: Observation) -> Bool[Array, "R N K"]:
        """Which image tokens stay: at most `obs.capacity` per head. Traced and pure."""
        raise NotImplementedError


def check_kernel(policy: Policy) -> None:
    """Refuse widths of a pooling, the argument `kernel`, that have no centre."""
    fits = policy.kernel is None or (1 <= policy.kernel <= 63 and policy.kernel % 2 == 1)
    policy.require("kernel", fits, " must be odd and between 1 (no pooling) and 63")


@dataclass(frozen=True, kw_only=True)
class ObservedTokenPolicy(TokenPolicy):
    """Base of those that the stage's newest `window` queries tell what to keep, and whose tokens
    stay; scores are pooled over `kernel` neighbours. A subclass has both fields; the window's
    default stands for `most_queries`, or the period if that is less."""

    most_queries: ClassVar[int]

    def prepare_stages(self, geometry: Geometry) -> "ObservedTokenPolicy":
        prepared = super().prepare_stages(geometry)
        if self.window != type(self).window:
            return prepared
        window = min(self.most_queries, max(1, prepared.period))  # a wrong period is told later
        return dataclasses.replace(prepared, window=window)

    def check_stage_arguments(self, geometry: Geometry) -> None:
        super().check_stage_arguments(geometry)
        otherwise = "" if type(self).window is None else ", or 0 to let the period decide"
        rule = f" must be 1 to the period, {self.period}{otherwise}"
        self.require("window", 1 <= self.window <= self.period, rule)
        check_kernel(self)

    def stay_always(self, geometry: Geometry) -> int:
        return self.window


@dataclass(frozen=True, kw_only=True)
class WindowedTokenPolicy(TokenPolicy):
    """Base of those that never drop the newest `window` image tokens, nor the first `sinks`."""

    window: int | None = None
    sinks: int = 0

    def prepare_stages(self, geometry: Geometry) -> "WindowedTokenPolicy":
        prepared = super().prepare_stages(geometry)
        if prepared.window is not None:
            return prepared
        room = image_slots(geometry, self.budget, self.accounting)
        stays = room if self.accounting == "tokens" else room - prepared.period
        window = LINES * geometry.schedule.line
        if stays < geometry.schedule.steps:
            free = (stays - self.sinks) * (HISTORY_SHARE - 1)
            while window > 1 and window * HISTORY_SHARE > free:
                window = window // 2
        return dataclasses.replace(
            prepared, window=max(1, min(window, geometry.schedule.steps - 1))
        )

    def check_stage_arguments(self, geometry: Geometry) -> None:
        super().check_stage_arguments(geometry)
        most = max(1, geometry.schedule.steps - 1)
        self.require("sinks", 0 <= self.sinks <= most, f" must be 0 to {most}")
        self.require("window", 1 <= self.window <= most, f" must be 1 to {most}")

    def stay_always(self, geometry: Geometry) -> int:
        return self.sinks + self.window
