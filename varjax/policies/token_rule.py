"""Bases of rules for models that draw token by token: decisions about image tokens, in stages
(`varjax.core.stages`). The condition always stays and is nobody's candidate."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry, StageAllocation
from varjax.core.errors import choose
from varjax.core.observation import Needs, Observation
from varjax.core.policy import Policy, Rule
from varjax.core.sequence import TOKENS, TokenSequence
from varjax.policies.capacities import image_slots
from varjax.policies.scale_rule import ScaleRule

LARGE = 128  # image slots of a head from which on a stage has 16 tokens, else 8
SHORT_STAGE, LONG_STAGE = 8, 16
STAGE_SHARE = 3  # an automatic stage takes at most a third of a head's image slots
HISTORY_SHARE = 6  # an automatic window leaves at least a sixth of what stays to history
LINES = 2  # "typically two rows" of the image
T = TypeVar("T")


def only_for(kind: str, default: T) -> T:
    """Declares a field of a policy that only models of one kind have a use for; given for others it
    is refused. default: its default, or its declaration (`within`)."""
    if not isinstance(default, dataclasses.Field):
        default = dataclasses.field(default=default)
    metadata = {**default.metadata, "only_for": kind}
    return dataclasses.field(default=default.default, metadata=metadata)


class TokenRule(Rule):
    """Base of rules for models that draw token by token; its policy is a `StagedPolicy`.

    A decision is made after every `period` image tokens (a stage). `inputs` are arrays [L, stages
    that end with a decision, ...]. At the allocation's `group_stage`, `regroup` may say once per
    image which heads are local: `obs` then lists the slots of the condition too, `obs.position`
    counts from the first token of the condition, and `obs.newest_mass` is there. Region 0 sees
    everything, region 1 only the newest `local_window` tokens, the current one included.
    """

    kind = TOKENS
    uses_calibration = False
    decides: ClassVar[bool] = True  # after every stage; else contents are known

    # --- arguments --------------------------------------------------------------------------------

    def longest_period(self, geometry: Geometry) -> int:
        """The automatic period, if there is room for it."""
        room = image_slots(geometry, self.policy.budget, self.policy.accounting)
        return LONG_STAGE if room >= LARGE else SHORT_STAGE

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> Policy:
        if self.policy.period is not None:
            return self.policy
        room = image_slots(geometry, self.policy.budget, self.policy.accounting)
        period = self.longest_period(geometry) if self.decides else 1
        while period > 1 and period * STAGE_SHARE > room:
            period = period // 2
        return dataclasses.replace(self.policy, period=period)

    def check(self, geometry: Geometry) -> None:
        most = max(1, geometry.schedule.steps - 1)
        self.policy.require("period", 1 <= self.policy.period <= most, f" must be 1 to {most}")

    def least(self, geometry: Geometry) -> str:
        parts = [f"the condition ({geometry.schedule.condition})"]
        parts.append(f"what always stays ({self.stay_always(geometry)})")
        parts += [f"the buffer of a stage ({self.policy.period})"] if self.decides else []
        return f"{', '.join(parts[:-1])} and {parts[-1]} take more tokens"

    # --- sizes ------------------------------------------------------------------------------------

    def stay_always(self, geometry: Geometry) -> int:
        """Image tokens of a head that no decision drops, at least one."""
        return 1

    def minimum_slots(self, geometry: Geometry) -> int:
        """Image slots that a head needs at least, the buffer included."""
        buffer = self.policy.period if self.decides else 0
        return min(geometry.schedule.steps, self.stay_always(geometry) + buffer)

    def minimum_budget(self, geometry: Geometry) -> float:
        sequence = geometry.schedule
        if self.policy.accounting == "tokens":
            return min(self.stay_always(geometry), sequence.steps) / sequence.image_tokens
        return (sequence.condition + self.minimum_slots(geometry)) / sequence.persistent_tokens

    def layer_slots(self, geometry: Geometry) -> np.ndarray | None:
        """int64 [L]: image slots of a head, the buffer included, where the arguments say them for
        each layer; they then fix the period, too. None: the budget decides, for all alike."""
        return None

    def slots(self, geometry: Geometry, budget: float) -> int:
        """Most image slots of a head that the budget pays for. Papers do not count the buffer."""
        given = self.layer_slots(geometry)
        if given is not None:
            return min(geometry.schedule.steps, int(given.max()))
        room = image_slots(geometry, budget, self.policy.accounting)
        if self.decides and self.policy.accounting == "tokens":
            room += self.policy.period
        return min(room, geometry.schedule.steps)

    def allocate(self, geometry: Geometry, budget: float) -> StageAllocation:
        """Image slots of every layer's heads; by default the same in all layers."""
        slots = self.slots(geometry, budget)
        return StageAllocation.uniform(geometry, slots, self.policy.period)

    def plan_lines(self, geometry: Geometry) -> list[str]:
        if not self.decides:
            return []
        newest = getattr(self.policy, "window", 0)
        kept = f", the newest {newest} always stay" if newest else ""
        return [f"stages    a decision after every {self.policy.period} tokens{kept}"]


@dataclass(frozen=True, kw_only=True)
class StagedPolicy(Policy):
    """Base of policies that serve models that draw token by token. One that has a `select` and says
    nothing else serves both kinds, and gives every head the same.

    On such models every head of every layer has room for the condition and B image tokens, B =
    floor(budget * F) less the condition. The newest `period` of them (P) are a buffer, which
    counts. After every P tokens the policy chooses which B - P stay.

    Args:
      period: tokens between two decisions, on models that draw token by token. By default 8, or 16
        from B = 128 on, halved until it is at most a third of B.
    """

    period: int | None = only_for(TOKENS, None)

    rules = (ScaleRule, TokenRule)


class ListedRule(TokenRule):
    """Base of rules whose `inputs` say what the next stage sees: bool [L, stages that end with a
    decision, R or 1, N, image tokens]."""

    inputs_heads = 1

    def select(self, obs: Observation) -> Bool[Array, "R N K"]:
        kept = jnp.broadcast_to(obs.inputs, (*obs.position.shape[:2], obs.inputs.shape[-1]))
        return obs.live & jnp.take_along_axis(kept, obs.position, axis=-1)


def period_of(sequence: TokenSequence, stages: int) -> int:
    """The period with which an image has so many stages besides the condition."""
    return -(-sequence.steps // max(1, stages))


class ObservingRule(TokenRule):
    """Base of rules whose stage's newest `window` queries say what to keep, and whose tokens stay.

    Scores are pooled over `kernel` neighbours. The policy has both fields; the default of `window`
    stands for `most_queries`, or for the period if that is less.
    """

    most_queries: ClassVar[int] = 8

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> Policy:
        policy = super().prepare(geometry, calibration)
        if policy.window != type(policy).window:
            return policy
        window = min(self.most_queries, max(1, policy.period))  # a wrong period is told later
        return dataclasses.replace(policy, window=window)

    def check(self, geometry: Geometry) -> None:
        super().check(geometry)
        policy = self.policy
        otherwise = "" if type(policy).window is None else ", or 0 to let the period decide"
        rule = f" must be 1 to the period, {policy.period}{otherwise}"
        policy.require("window", 1 <= policy.window <= policy.period, rule)
        check_kernel(policy)

    def stay_always(self, geometry: Geometry) -> int:
        return self.policy.window


class WindowedRule(TokenRule):
    """Base of rules that never drop the newest `window` image tokens, nor the first `sinks`, and
    look at a `score` of all queries of a stage; the policy has these fields. A `window` of None
    becomes two lines of the image, or less."""

    @property
    def needs(self) -> Needs:
        if self.policy.score == "logit":
            return Needs(window=self.policy.period, window_logits=True)
        return Needs(scale_mass=True)

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> Policy:
        policy = super().prepare(geometry, calibration)
        if policy.window is not None:
            return policy
        room = image_slots(geometry, policy.budget, policy.accounting)
        stays = room if policy.accounting == "tokens" else room - policy.period
        window = LINES * geometry.schedule.line
        if stays < geometry.schedule.steps:
            free = (stays - policy.sinks) * (HISTORY_SHARE - 1)
            while window > 1 and window * HISTORY_SHARE > free:
                window = window // 2
        window = max(1, min(window, geometry.schedule.steps - 1))
        return dataclasses.replace(policy, window=window)

    def check(self, geometry: Geometry) -> None:
        super().check(geometry)
        policy, most = self.policy, max(1, geometry.schedule.steps - 1)
        policy.require("sinks", 0 <= policy.sinks <= most, f" must be 0 to {most}")
        policy.require("window", 1 <= policy.window <= most, f" must be 1 to {most}")
        choose("score", policy.score, ("attention", "logit"))

    def stay_always(self, geometry: Geometry) -> int:
        return self.policy.sinks + self.policy.window


def check_kernel(policy: Policy) -> None:
    """Refuses widths of a pooling, the argument `kernel`, that have no centre."""
    fits = policy.kernel is None or (1 <= policy.kernel <= 63 and policy.kernel % 2 == 1)
    policy.require("kernel", fits, " must be odd and between 1 (no pooling) and 63")
