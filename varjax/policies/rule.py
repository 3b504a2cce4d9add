"""A policy's part on one kind of model: one interface, whatever the model draws at a time.

The planner, the cache and the engine ask a `Rule` only. A policy for one kind of model is its own
rule. A policy for both is its own rule for models that draw scale by scale, and names a small
second class for the others (`Policy.token_rule`), which reads its arguments from `self.policy`.

Most policies write some of six members and nothing else: `needs`, `prepare`, `check`, `allocate`,
`inputs` and `select`. The others are rare hooks, which few policies override.
"""

from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, PyTree

from varjax.cache.allocation import Allocation, Geometry
from varjax.cache.observation import Needs, Observation
from varjax.cache.stages import StageAllocation
from varjax.calibration.data import Calibration
from varjax.errors import UserError

if TYPE_CHECKING:
    from varjax.policies.base import Policy


class Rule:
    """Base of the rules for both kinds of models; rules of equal policies are equal.

    policy: the policy with its arguments; itself where the policy is its own rule.
    kind: which models it serves, `varjax.sequence.SCALES` or `TOKENS`.
    needs: what `select` wants to see. It may be a property.
    compares_heads: what makes `select` or `regroup` compare the heads of a layer with each other,
      for a message: such heads must lie on one device. None: every head is decided by itself. Asked
      on models that draw token by token only; it may be a property.
    inputs_heads: the axis of heads in `obs.inputs`, where they differ from head to head. None: all
      heads share them. Asked as the one before.
    """

    policy: "Policy"
    kind: ClassVar[str]
    needs: Needs = Needs()
    compares_heads: str | None = None
    inputs_heads: int | None = None

    def __init__(self, policy: "Policy"):
        self.policy = policy

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.policy == self.policy

    def __hash__(self) -> int:
        return hash((type(self), self.policy))

    @property
    def selects(self) -> bool:
        """Whether the policy can decide on the device."""
        return type(self).select is not Rule.select

    uses_calibration = property(attrgetter("policy.uses_calibration"))  # measurements decide

    # --- host: arguments --------------------------------------------------------------------------

    def prepare(self, geometry: Geometry, calibration: Calibration | None) -> "Policy":
        """The policy with what the model, the budget and the calibration decide filled in; called
        before `check`.

        Raises:
          UserError: the policy needs a calibration, or another one.
        """
        return self.policy

    def check(self, geometry: Geometry) -> None:
        """Raises `UserError` for arguments that no budget would make work on this model, before
        anything is compiled. The policy is prepared."""

    def check_budget(self, geometry: Geometry) -> None:
        """Raises `UserError` if the budget is too small; the message names the smallest feasible
        one."""
        policy, lowest = self.policy, self.minimum_budget(geometry)
        if policy.budgeted and policy.budget < lowest - 1e-9:
            blocks = " in blocks of one slot" if policy.block_size > 1 else ""
            raise UserError(
                f"budget={policy.budget:g} is too small for policy {policy.name!r} on this model: "
                f"{self.least(geometry)}; the smallest feasible budget{blocks} is "
                f"{np.ceil(lowest * 1e4) / 1e4:g}"
            )

    def minimum_budget(self, geometry: Geometry) -> float:
        """The smallest feasible budget."""
        raise NotImplementedError

    def least(self, geometry: Geometry) -> str:
        """Why no budget below the smallest one is feasible, in words."""
        raise NotImplementedError

    # --- host: sizes and tables -------------------------------------------------------------------

    def allocate(self, geometry: Geometry, budget: float) -> Allocation | StageAllocation:
        """The room of every head, for at most `budget` of the full cache. By default all
        heads get the same."""
        raise NotImplementedError

    def inputs(
        self, geometry: Geometry, allocation, image_index: np.ndarray
    ) -> PyTree[ArrayLike] | None:
        """Facts that `select` needs for every decision, for a batch of images; None for nothing.
        Arrays [K, L, ...] by scale and layer, or [L, stages that end with a decision, ...]."""
        return None

    def plan_lines(self, geometry: Geometry) -> list[str]:
        """Lines of a printed plan about this (prepared) policy."""
        return []

    def steady_tokens(self, geometry: Geometry) -> int | None:
        """Tokens per head, summed over layers, that the policy's paper counts as its memory; None:
        those that the last scale sees."""
        return None

    # --- device -----------------------------------------------------------------------------------

    def regroup(self, obs: Observation) -> Int[Array, "R N"]:
        """Assigns heads to regions, once per image, when the allocation says so."""
        raise NotImplementedError

    def init_state(self, geometry: Geometry, rows: int) -> PyTree[ArrayLike] | None:
        """Pytree of arrays that every layer carries from scale to scale; None for none."""
        return None

    def update_state(self, obs: Observation) -> PyTree[Array] | None:
        """The state after this scale; called before `select`, which sees the result. A rule that
        overrides this is asked at every scale, the last one included."""
        return obs.state

    def select(self, obs: Observation) -> Bool[Array, "R N K"]:
        """The live tokens to keep: at most `obs.capacity` per head. Traced and pure."""
        raise NotImplementedError
