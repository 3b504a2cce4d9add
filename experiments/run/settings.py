"""What a run does, resolved from flags before anything is compiled."""

import hashlib
from dataclasses import dataclass

from experiments.flags.generation import GenerationSettings
from experiments.flags.given import Given
from experiments.settings import policy_arguments
from varjax.cache.plan import CachePlan
from varjax.policies import Policy


@dataclass(frozen=True, eq=False, kw_only=True)
class RunSettings(GenerationSettings):
    """A resolved run. calibration: SHA-256 of the calibration file. remarks: of the policy, on its
    plan."""

    policy: Policy
    plan: CachePlan
    compare: bool
    save_arrays: bool
    given: Given = Given()
    calibration: str | None = None
    remarks: tuple[str, ...] = ()

    def describe(self) -> dict:
        """JSON-able content: what decides the results."""
        return {
            **super().describe(),
            "policy": self.policy.name,
            "policy_args": policy_arguments(self.policy),
            "budget": self.policy.budget,
            "plan": self.plan.digest,
            "policy_content": self.policy.content(),
            "calibration": self.calibration,
            "compare": self.compare,
            "save_arrays": self.save_arrays,
            "given": self._given(),
        }

    def _given(self) -> str | None:
        if self.given.tokens is None:
            return None
        digest = hashlib.sha256(self.given.tokens.tobytes()).hexdigest()[:16]
        return f"{digest}:{self.given.scales}"
