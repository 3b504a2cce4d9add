"""Learned tables: which head may see which token for how long, learned through the model."""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from varjax.calibration.data import Calibration
from varjax.calibration.files import LEARNED
from varjax.core.allocation import Geometry, StageAllocation, StaticAllocation
from varjax.policies import capacities
from varjax.policies.last_uses import best_last_uses, last_uses_of_heads
from varjax.policies.registry import register
from varjax.policies.scale_rule import CONTENTS_FOLLOW, ScaleRule
from varjax.policies.token_rule import ListedRule, StagedPolicy, period_of

LEAST_GAIN = 0.1 / 255  # of a token that is worth nothing: room that is left over takes it


def gain_of(table: np.ndarray) -> Float[np.ndarray, "K L N F"]:
    """What every scale, or stage, sees in a token, of a table as a file holds it, uint8 [K - 1, L,
    N, F]."""
    gain = np.zeros((1 + len(table), *table.shape[1:]), np.float32)
    gain[1:] = np.maximum(table / np.float32(255), LEAST_GAIN)
    return gain


class LearnedScales(ScaleRule):
    """Which head sees which token for how long, from a learned table."""

    policy: "Learned"

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Learned":
        return self.policy.with_tables(geometry, calibration)

    def minimum_budget(self, geometry: Geometry) -> float:
        """One token in all."""
        return 1 / max(1, geometry.dense_tokens)

    def source(self, geometry: Geometry) -> Int[np.ndarray, " F"]:
        """The scale of every token that is cached."""
        return geometry.schedule.scale_of_token[: geometry.schedule.persistent_tokens]

    def room(self, geometry: Geometry, budget: float) -> int:
        """Tokens that all heads may hold together after any store."""
        return capacities.total(geometry, budget)

    def last_uses(
        self, gain: Float[np.ndarray, "K L N F"], geometry: Geometry, room: int
    ) -> Int[np.ndarray, "L N F"]:
        """The best last uses. gain: what each scale sees in a token."""
        source = self.source(geometry)
        return best_last_uses(gain, source, np.ones_like(source), room)

    def allocate(self, geometry: Geometry, budget: float) -> StaticAllocation:
        schedule = geometry.schedule
        last_use = self.last_uses(self.policy.gain, geometry, self.room(geometry, budget))
        # the last scale is never stored
        last = np.full((*last_use.shape[:2], schedule.tokens[-1]), schedule.num_scales - 1)
        return StaticAllocation(np.concatenate([last_use, last], axis=-1).astype(np.int16))


class LearnedTokens(ListedRule):
    """Which head sees which image token for how many stages, from a learned table. All heads hold
    the same number."""

    policy: "Learned"
    uses_calibration = True

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Learned":
        """With the period of the tables."""
        policy, given = self.policy.with_tables(geometry, calibration), self.policy.period
        period = period_of(geometry.schedule, len(policy.table))
        rule = f": the tables were learned with {period}, leave it out or learn others"
        policy.require("period", given in (None, period), rule)
        return replace(policy, period=period)

    def source(self, geometry: Geometry) -> Int[np.ndarray, " F"]:
        """The stage of every image token that is cached."""
        return 1 + np.arange(geometry.schedule.steps) // self.policy.period

    def room(self, geometry: Geometry, budget: float) -> int:
        """Image tokens of a head that may stay after a stage."""
        return self.slots(geometry, budget) - self.policy.period

    def last_uses(
        self, gain: Float[np.ndarray, "K L N F"], geometry: Geometry, room: int
    ) -> Int[np.ndarray, "L N F"]:
        """Last uses of those that are worth most. gain: what each stage sees in a token."""
        return last_uses_of_heads(gain, self.source(geometry), room)

    def inputs(
        self, geometry: Geometry, allocation: StageAllocation, image_index: np.ndarray
    ) -> np.ndarray:
        room = int(allocation.slots[0]) - self.policy.period
        if room not in self.policy.known:
            last = self.last_uses(self.policy.gain, geometry, room)[:, None]
            stage = np.arange(2, 1 + len(self.policy.table))[:, None, None]
            # the last token of an image is seen by none
            seen = np.pad(last >= stage, [(0, 0)] * 3 + [(0, 1)])
            self.policy.known[room] = seen[:, :, None]
        return self.policy.known[room]


@register("learned")
@dataclass(frozen=True, kw_only=True)
class Learned(StagedPolicy):
    """The tokens that a model was found to need: tables learned through it; varjax's own.

    Idea: contents that are known beforehand cost nothing while an image is drawn, and the order of
    scales is fixed. So the table itself can be learned, token by token and head by head, on images
    that the full cache has drawn, for the very distance that it is judged by. What attention mass
    cannot see, this does: neighbours stand for each other, so that one of them is enough.

    1. Learning (`python -m experiments.learn`, docs/howto/learn.md): for every token of every head
       and every scale, the divergence from the full cache's logits if the token were dropped, or
       kept, is estimated to second order. Step by step the best take the place of the worst.
    2. Table: of all last uses that fit the budget, those with the greatest sum of gains over tokens
       and scales (`varjax.policies.last_uses`).

    On models that draw token by token a stage of P tokens takes the place of a scale. Every head
    holds the condition, the buffer of P tokens, and as many image tokens as are left: after a stage
    those with the greatest sum of gains over the stages to come.

    Needs learned tables: learned.npz in the checkpoint folder, or a file that is named as the
    calibration. It belongs to one model, schedule and guidance.

    Args:
      budget: fraction of the full cache, kept after every layer of every scale. Of the tables of a
        file the one learned for the next larger budget counts (the same budget, if it is there);
        above all of them, that of the largest.
      period: P, token by token; it is that of the tables and need not be given.

    Differs from `knapsack`, which asks attention mass what whole scales are worth. Gates of heads
    and entries have been learned for language models (DuoAttention, 2410.10819; KVP, 2602.10238),
    where contents depend on the text. Not from a paper.
    """

    budget: float = 0.1
    _calibration: Calibration | None = field(default=None, repr=False, compare=False)

    rules = (LearnedScales, LearnedTokens)
    unfit_roles = {"select": f"{CONTENTS_FOLLOW} learned table"}
    summary = "per head the tokens that it was found to need; needs learned tables"
    smallest_reason = "at least one token has to stay"
    uses_calibration = True
    calibration_files = (LEARNED,)

    def with_tables(self, geometry: Geometry, calibration: Calibration | None) -> "Learned":
        """This policy with the tables of a file; `UserError` if it has none that fit."""
        if calibration is None or not calibration.learned:
            lacks = "" if calibration is None else ", and the calibration holds no learned tables"
            self.refuse(
                f"it needs to know which tokens heads can do without{lacks}: learn it "
                f"(`python -m experiments.learn` writes {LEARNED}), and leave the file in the "
                "checkpoint folder, or name it as the calibration"
            )
        calibration.check(geometry)
        return replace(self, _calibration=calibration)

    # --- of a prepared policy ---------------------------------------------------------------------

    @property
    def table(self) -> np.ndarray:
        """uint8 [K - 1, L, N, F]."""
        tables = self._calibration.learned
        above = [budget for budget in tables if budget >= self.budget - 1e-9]
        return tables[min(above) if above else max(tables)]

    @property
    def gain(self) -> np.ndarray:
        """float32 [K, L, N, F]: what every scale, or stage, sees in a token."""
        return gain_of(self.table)

    @cached_property
    def known(self) -> dict[int, np.ndarray]:
        """Inputs of the device for each number of tokens that may stay."""
        return {}

    def content(self) -> str | None:
        """SHA-256 of the table."""
        if self._calibration is None:
            return None
        return hashlib.sha256(np.ascontiguousarray(self.table).tobytes()).hexdigest()
