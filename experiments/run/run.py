"""What a run does, resolved from flags before anything is compiled."""

import hashlib
from dataclasses import dataclass

import numpy as np

from experiments.generation import Generation, policy_arguments
from varjax.cache.plan import CachePlan
from varjax.policies import Policy


@dataclass(frozen=True, eq=False, kw_only=True)
class Run(Generation):
    """A resolved run.

    policy: as it was asked for; that of the plan has what a calibration decides filled in.
    given_tokens: replace the draw in the first `given_scales` scales (None: all).
    calibration: SHA-256 of the file. remarks: of the policy, on its plan.
    """

    policy: Policy
    plan: CachePlan
    compare: bool
    save_arrays: bool
    given_tokens: np.ndarray | None
    given_scales: int | None
    calibration: str | None
    remarks: tuple[str, ...]

    def describe(self) -> dict:
        """JSON-able content: what decides the results."""
        given = None
        if self.given_tokens is not None:
            digest = hashlib.sha256(self.given_tokens.tobytes()).hexdigest()[:16]
            given = f"{digest}:{self.given_scales}"
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
            "given": given,
        }
