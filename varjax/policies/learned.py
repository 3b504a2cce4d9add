"""Learned tables: which head may see which token for how long, learned through the model."""

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from varjax.calibration.data import Calibration
from varjax.calibration.files import LEARNED
from varjax.core.allocation import Geometry, StaticAllocation
from varjax.core.policy import Policy
from varjax.policies.last_uses import best_last_uses
from varjax.policies.registry import register
from varjax.policies.scale_rule import CONTENTS_FOLLOW, ScaleRule

LEAST_GAIN = 0.1 / 255  # of a token that was never kept: room that is left over takes it


class LearnedScales(ScaleRule):
    """Which head sees which token for how long, from a learned table."""

    policy: "Learned"

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Learned":
        if calibration is None or not calibration.learned:
            lacks = "" if calibration is None else ", and the calibration holds no learned tables"
            self.policy.refuse(
                f"it needs to know which tokens heads can do without{lacks}: learn it "
                f"(`python -m experiments.learn` writes {LEARNED}), and leave the file in the "
                "checkpoint folder, or name it as the calibration"
            )
        calibration.check(geometry)
        return replace(self.policy, _calibration=calibration)

    def minimum_budget(self, geometry: Geometry) -> float:
        """One token in all."""
        return 1 / max(1, geometry.dense_tokens)

    def allocate(self, geometry: Geometry, budget: float) -> StaticAllocation:
        schedule = geometry.schedule
        gain = np.zeros((schedule.num_scales, *self.policy.table.shape[1:]), np.float32)
        gain[1:] = np.maximum(self.policy.table / np.float32(255), LEAST_GAIN)
        source = schedule.scale_of_token[: schedule.persistent_tokens]
        limit = int(budget * geometry.dense_tokens + 1e-6)
        last_use = best_last_uses(gain, source, np.ones_like(source), limit)
        # the last scale is never stored
        last = np.full((*last_use.shape[:2], schedule.tokens[-1]), schedule.num_scales - 1)
        return StaticAllocation(np.concatenate([last_use, last], axis=-1).astype(np.int16))


@register("learned")
@dataclass(frozen=True, kw_only=True)
class Learned(Policy):
    """The tokens that a model was found to need: tables learned by gradients through it; varjax's
    own.

    Idea: contents that are known beforehand cost nothing while an image is drawn, and the order of
    scales is fixed. So the table itself can be learned, token by token and head by head, on images
    that the full cache has drawn, for the very distance that it is judged by. What attention mass
    cannot see, gradients do: neighbours stand for each other, so that one of them is enough.

    1. Learning (`python -m experiments.learn`, docs/howto/learn.md): every token of every head has
       probabilities of its last use, the last scale that sees it. Sampled last uses gate the
       attention of the model; its logits are to stay those of the full cache, and the expected
       tokens after every store are to stay within the budget.
    2. Table: of all last uses that fit the budget, those with the greatest sum of sqrt(P(scale s
       still sees the token)) over tokens and scales (`varjax.policies.last_uses`).

    Needs learned tables: learned.npz in the checkpoint folder, or a file that is named as the
    calibration. It belongs to one model, schedule and guidance.

    Args:
      budget: fraction of the full cache, kept after every layer of every scale. Of the tables of a
        file the one learned for the next larger budget counts (the same budget, if it is there);
        above all of them, that of the largest.

    Differs from `knapsack`, which asks attention mass what whole scales are worth. Gates of heads
    and entries have been learned for language models (DuoAttention, 2410.10819; KVP, 2602.10238),
    where contents depend on the text. Not from a paper.
    """

    budget: float = 0.1
    _calibration: Calibration | None = field(default=None, repr=False, compare=False)

    rules = (LearnedScales,)
    unfit_roles = {"select": f"{CONTENTS_FOLLOW} learned table"}
    unsuited = "a table lists tokens of scales"
    summary = "per head the tokens that it was found to need; needs learned tables"
    smallest_reason = "at least one token has to stay"
    uses_calibration = True
    calibration_files = (LEARNED,)

    @property
    def table(self) -> np.ndarray:
        """uint8 [K - 1, L, N, F], of a prepared policy."""
        tables = self._calibration.learned
        above = [budget for budget in tables if budget >= self.budget - 1e-9]
        return tables[min(above) if above else max(tables)]

    def content(self) -> str | None:
        """SHA-256 of the table, of a prepared policy."""
        if self._calibration is None:
            return None
        return hashlib.sha256(np.ascontiguousarray(self.table).tobytes()).hexdigest()
