"""A policy has arguments, a selection, and a `Rule` for each kind of model that it serves.

The selection (`Policy.needs`, `Policy.select`) is the method itself: what it looks at, and which
tokens stay. A rule is what the method needs around it on one kind of model: how much heads hold,
and what is known beforehand. The planner, the cache and the engine ask a `Rule` only. A method that
selects differently on the two kinds has `needs` and `select` in its rules.

A policy is a frozen dataclass; its fields are the `--policy_args`, its docstring is its manual. It
never moves bytes.
"""

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, NoReturn

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, PyTree

from varjax.core import arguments
from varjax.core.allocation import Allocation, Geometry, StageAllocation
from varjax.core.errors import UserError, about, show
from varjax.core.observation import Needs, Observation
from varjax.core.sequence import SCALES, TOKENS

DRAWS = {SCALES: "scale by scale", TOKENS: "token by token"}
BUDGET = {  # its range, and what a message about it says
    "low": 0,
    "high": 1,
    "above": True,
    "note": ": it is the fraction of the full cache's bytes that may be kept",
}


class Rule:
    """A policy's part on one kind of model; rules of equal policies are equal. All have
    `kind`, `minimum_budget` and `allocate`, token by token `slots` and `minimum_slots`, too. Most
    write some of `prepare`, `check` and `inputs`; the others are rare hooks.

    policy: the policy with its arguments.
    kind: which models it serves, `varjax.core.sequence.SCALES` or `TOKENS`.
    needs: what `select` wants to see; by default, as `select`, the policy's.
    compares_heads: what makes `select` or `regroup` compare the heads of a layer with each other,
      for a message: such heads must lie on one device. None: every head is decided by itself. Asked
      on models that draw token by token only, as the next two.
    inputs_heads: the axis of heads in `obs.inputs`, where they differ from head to head. None: all
      heads share them.
    local_window: newest tokens that local heads see (`regroup`); None where no head is local.
    """

    policy: "Policy"
    kind: ClassVar[str]
    needs: Needs = property(attrgetter("policy.needs"))
    uses_calibration = property(attrgetter("policy.uses_calibration"))  # measurements decide
    compares_heads: str | None = None
    inputs_heads: int | None = None
    local_window: int | None = None

    def __init__(self, policy: "Policy"):
        self.policy = policy

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.policy == self.policy

    def __hash__(self) -> int:
        return hash((type(self), self.policy))

    @property
    def selects(self) -> bool:
        """Whether the policy can decide on the device."""
        own = type(self).select is not Rule.select
        return own or type(self.policy).select is not Policy.select

    # --- host -------------------------------------------------------------------------------------

    def prepare(self, geometry: Geometry, calibration: Any) -> "Policy":
        """The policy with what the model, the budget and the calibration decide filled in; called
        before `check`. `UserError` if the policy needs a calibration, or another one."""
        return self.policy

    def check(self, geometry: Geometry) -> None:
        """Raises `UserError` for arguments that no budget would make work on this model, before
        anything is compiled. The policy is prepared."""

    def check_budget(self, geometry: Geometry) -> None:
        """Raises `UserError` if the budget is too small, which names the smallest feasible one."""
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
        raise NotImplementedError(f"{type(self).__name__} has no `minimum_budget`")

    def least(self, geometry: Geometry) -> str:
        """Why no budget below the smallest one is feasible, in words."""
        return self.policy.smallest_reason

    def allocate(self, geometry: Geometry, budget: float) -> Allocation | StageAllocation:
        """The room of every head, for at most `budget` of the full cache."""
        raise NotImplementedError(f"{type(self).__name__} has no `allocate`")

    def slots(self, geometry: Geometry, budget: float) -> int:
        """Most image slots of a head that the budget pays for (token by token only)."""
        raise NotImplementedError(f"{type(self).__name__} has no `slots`")

    def minimum_slots(self, geometry: Geometry) -> int:
        """Image slots that a head needs at least (token by token only)."""
        raise NotImplementedError(f"{type(self).__name__} has no `minimum_slots`")

    def inputs(self, geometry: Geometry, allocation, image_index) -> PyTree[ArrayLike] | None:
        """Facts that `select` needs for every decision, for a batch of images; None for nothing.
        Arrays [K, L, ...] by scale and layer, or [L, stages that end with a decision, ...]."""
        return None

    def window_tokens(self, height: int, width: int) -> np.ndarray:
        """int [W]: which tokens of a scale of this map size (row-major) are the window queries;
        repetitions are allowed (scale by scale only)."""
        raise NotImplementedError(f"{type(self).__name__} has no `window_tokens`")

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
        raise NotImplementedError(f"{type(self).__name__} has no `regroup`")

    def init_state(self, geometry: Geometry, rows: int) -> PyTree[ArrayLike] | None:
        """Pytree of arrays that every layer carries from scale to scale; None for none."""
        return None

    def update_state(self, obs: Observation) -> PyTree[Array] | None:
        """The state after this scale; called before `select`, which sees the result. A rule that
        overrides this is asked at every scale, the last one included."""
        return obs.state

    def select(self, obs: Observation) -> Bool[Array, "R N K"]:
        return self.policy.select(obs)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all policies: what they are called and given, and what they keep.

    Args:
      budget: fraction of the dense persistent bytes, in (0, 1].
      accounting: "bytes" charges block rounding to the budget; "tokens" counts as the papers do.
      block_size: slots per block, a power of two; 0 lets the planner choose.
    """

    budget: float = 1.0
    accounting: str = "bytes"
    block_size: int = 0

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    rules: ClassVar[tuple[type[Rule], ...]] = ()  # at most one for each kind of model
    unsuited: ClassVar[str] = "it decides about whole scales, of which those have none"
    # Ask an instance for these: where arguments decide, they are properties.
    # needs: what `select` wants to see
    # budgeted: False if the contents are given and the budget is what they cost
    # shrinks: False if `allocate` ignores the budget
    needs: ClassVar[Needs] = Needs()
    budgeted: ClassVar[bool] = True
    shrinks: ClassVar[bool] = True
    uses_calibration: ClassVar[bool] = False
    # where it is in the folder of a checkpoint, if it is not given
    calibration_files: ClassVar[tuple[str, ...]] = ("calibration.json",)
    # arguments that matter to `allocate`, and those that matter to its selection in capacities of
    # another policy: a composition refuses the others; None: all
    allocation_arguments: ClassVar[tuple[str, ...] | None] = None
    selection_arguments: ClassVar[tuple[str, ...] | None] = None
    # roles that a composition refuses to give it, "allocate" or "select", each with the reason
    unfit_roles: ClassVar[dict[str, str]] = {}
    contents: ClassVar[str] = ""  # for tables, where it is not simply "decided per image" or not
    names_files: ClassVar[tuple[str, ...]] = ()  # arguments that name files of this machine
    smallest_reason: ClassVar[str] = "every head needs room for at least one token"
    # argument sets that the generic tests take, the defaults first
    examples: ClassVar[tuple[dict[str, str], ...]] = ({},)

    def select(self, obs: Observation) -> Bool[Array, "R N K"]:
        """The live tokens to keep: at most `obs.capacity` per head. Traced and pure. Nothing checks
        the number: of more, as many as there are slots stay."""
        raise NotImplementedError

    @classmethod
    def serves(cls, kind: str) -> bool:
        """Whether it has a rule for models that draw this at a time: "scales" or "tokens"."""
        return any(rule.kind == kind for rule in cls.rules)

    def rule(self, kind: str) -> Rule:
        """The policy's rule for models that draw `kind` (`Geometry.kind`) at a time. `UserError` if
        it does not serve them, or was given an argument that only others have a use for."""
        rules = {rule.kind: rule for rule in self.rules}
        if kind not in rules:
            why = self.unsuited if rules else "it has no `rules`"
            self.refuse(f"it does not serve models that draw {DRAWS[kind]}: {why}")
        for f in fields(self):
            other = f.metadata.get("only_for", kind)
            if other != kind:
                rule = f" is for models that draw {DRAWS[other]}, this one draws {DRAWS[kind]}"
                self.require(f.name, getattr(self, f.name) == f.default, f"{rule}: leave it out")
        return rules[kind](self)

    def __init_subclass__(cls, **more: object):
        super().__init_subclass__(**more)
        if "__repr__" not in vars(cls):  # else `dataclass` writes one that lists all fields
            cls.__repr__ = Policy.__repr__

    def __repr__(self) -> str:
        """One line: the budget, and the arguments that differ from their defaults."""
        told = [f"budget={self.budget:g}"]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "budget" and f.repr and f.name[0] != "_" and value != f.default:
                told.append(f"{f.name}={show(value)}")
        return f"{type(self).__name__}({', '.join(told)})"

    def __post_init__(self):
        """Checks types and ranges; `UserError` names the policy and the field."""
        with about(f"policy {self.name!r}"):
            arguments.check_fields(self, {"budget": BUDGET})
        if self.accounting not in ("bytes", "tokens"):
            raise UserError(f"accounting={show(self.accounting)}: choose bytes or tokens")

    def refuse(self, reason: str) -> NoReturn:
        raise UserError(f"policy {self.name!r}: {reason}")

    def require(self, name: str, fits: bool, rule: str) -> None:
        """Refuses the value of argument `name` unless it fits; `rule` goes on after
        `name=value`."""
        if not fits:
            self.refuse(f"{name}={getattr(self, name)}{rule}")

    def content(self) -> str | None:
        """Further input that decides the results, as text: say the hash of a named file."""
        return None

    def check_images(self, num_images: int) -> None:
        """Raises `UserError` if the policy cannot serve a run of this many images."""
