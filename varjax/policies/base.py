"""What a policy is: a static allocation on the host and, if contents depend on the image, a pure
selection over masks.

A policy is a frozen dataclass in one file; its fields are the `--policy_args`, its docstring is its
manual. It never moves bytes.
"""

import dataclasses
import types
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

import numpy as np
from jaxtyping import Array, Bool, Int

from varjax import arguments
from varjax.cache.allocation import Allocation, Geometry, RegionAllocation
from varjax.cache.observation import Needs, Observation
from varjax.errors import UserError, about, nearest, show
from varjax.policies import capacities
from varjax.sequence import SCALES, TOKENS

BUDGET = {  # its range, and what a message about it says
    **{"low": 0, "high": 1, "above": True},
    "note": ": it is the fraction of the full cache's bytes that may be kept",
}
LARGEST_INTEGER = 2**31 - 1  # of a field that says no range
CALIBRATE = "a calibration (`python -m experiments.calibrate` writes one)"


class NotGiven(float):
    """A default that can be told from the same number given by the user."""


def within(default: Any, low: float, high: float, **more: Any) -> Any:
    """A field of a policy that is a number from `low` to `high`, whatever the model. more: of
    `arguments.number`."""
    return dataclasses.field(
        default=default, metadata={"limits": {"low": low, "high": high} | more}
    )


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all policies.

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
    needs: ClassVar[Needs] = Needs()
    # which models it serves, why no others, and arguments that only one kind has a use for
    serves: ClassVar[tuple[str, ...]] = (SCALES,)
    unsuited: ClassVar[str] = "it decides about whole scales, of which those have none"
    only_for: ClassVar[dict[str, tuple[str, ...]]] = {}
    # Ask an instance for these three: where arguments decide, they are properties.
    # budgeted: False if the contents are given and the budget is what they cost
    # shrinks: False if `allocate` ignores the budget
    budgeted: ClassVar[bool] = True
    shrinks: ClassVar[bool] = True
    uses_calibration: ClassVar[bool] = False
    # arguments that matter to `allocate`, and those that matter to its selection in capacities of
    # another policy: a composition refuses the others; None: all
    allocation_arguments: ClassVar[tuple[str, ...] | None] = None
    selection_arguments: ClassVar[tuple[str, ...] | None] = None
    smallest_reason: ClassVar[str] = "every head needs room for at least one token"
    contents: ClassVar[str] = ""  # for tables, where it is not simply "decided per image" or not
    # argument sets that the generic tests take, the defaults first
    examples: ClassVar[tuple[dict[str, str], ...]] = ({},)

    # --- arguments --------------------------------------------------------------------------------

    def __post_init__(self):
        """Check the type of every field that is a number, a text or a truth value, and its range
        (`within`).

        Raises:
          UserError: naming the policy and the field.
        """
        for f in fields(self):
            _, check, _ = _KINDS.get(_name_of(f.type), (None, None, None))
            if check is not None and f.name[0] != "_":
                usual = BUDGET if f.name == "budget" else _LIMITS.get(_name_of(f.type), {})
                limits = f.metadata.get("limits", usual)
                with about(f"policy {self.name!r}"):
                    value = check(f.name, getattr(self, f.name), **limits)
                object.__setattr__(self, f.name, value)

    @classmethod
    def argument_types(cls) -> dict[str, Any]:
        """The `--policy_args`: all fields but the budget and those with a leading underscore."""
        return {f.name: f.type for f in fields(cls) if f.name != "budget" and f.name[0] != "_"}

    @classmethod
    def from_arguments(cls, arguments: dict[str, str]) -> dict[str, Any]:
        """Values of this policy's fields from the text of `--policy_args`.

        Raises:
          UserError: an argument is unknown or malformed.
        """
        known = cls.argument_types()
        for name in arguments:
            if name not in known:
                raise UserError(
                    f"policy {cls.name!r} has no argument {name!r}{nearest(name, known)}; it has: "
                    f"{', '.join(known)}"
                )
        return {name: parse_value(name, text, known[name]) for name, text in arguments.items()}

    def refuse(self, reason: str) -> NoReturn:
        raise UserError(f"policy {self.name!r}: {reason}")

    def require(self, name: str, fits: bool, rule: str) -> None:
        """Refuse the value of argument `name` unless it fits; `rule` goes on after `name=value`."""
        if not fits:
            value = getattr(self, name)
            self.refuse(
                f"{name}={value:g}{rule}" if isinstance(value, float) else f"{name}={value}{rule}"
            )

    def measured(
        self, calibration: Any, name: str, geometry: Geometry, *, what: str, give: str = CALIBRATE
    ) -> np.ndarray:
        """float64: measurement `name`, of this model, that the policy cannot do without.

        Raises:
          UserError: `what` the policy has to know is not there, with what to `give` for it.
        """
        if getattr(calibration, name, None) is None:
            lacks = "" if calibration is None else f", and the calibration holds no {name}"
            raise UserError(f"policy {self.name!r} needs to know {what}{lacks}: give {give}")
        calibration.check(geometry)
        return np.asarray(getattr(calibration, name), np.float64)

    # --- host -------------------------------------------------------------------------------------

    def check_kind(self, geometry: Geometry) -> None:
        """Raise `UserError` if the policy, or an argument given to it, is for models of the other
        kind."""
        kind, draws = geometry.kind, {SCALES: "scale by scale", TOKENS: "token by token"}
        if kind not in self.serves:
            self.refuse(f"it does not serve models that draw {draws[kind]}: {self.unsuited}")
        defaults = {f.name: f.default for f in fields(self)}
        for other in draws.keys() - {kind}:
            for name in self.only_for.get(other, ()):
                given = getattr(self, name) != defaults[name]
                rule = f" is for models that draw {draws[other]}, this one draws {draws[kind]}"
                self.require(name, not given, f"{rule}: leave it out")

    def prepare(self, geometry: Geometry, calibration: Any) -> "Policy":
        """This policy with what the calibration decides filled in; called before `check`.

        Raises:
          UserError: the policy needs a calibration, or another one.
        """
        return self

    def check(self, geometry: Geometry) -> None:
        """Raise `UserError` for arguments that cannot work on this model, before anything is
        compiled."""
        if self.accounting not in ("bytes", "tokens"):
            raise UserError(f"accounting={show(self.accounting)}: choose bytes or tokens")
        lowest = self.minimum_budget(geometry)
        if self.budgeted and self.budget < lowest - 1e-9:
            blocks = " in blocks of one slot" if self.block_size > 1 else ""
            raise UserError(
                f"budget={self.budget:g} is too small for policy {self.name!r} on this model: "
                f"{self.smallest_reason}; the smallest feasible budget{blocks} is "
                f"{np.ceil(lowest * 1e4) / 1e4:g}"
            )

    def minimum_budget(self, geometry: Geometry) -> float:
        """Smallest feasible budget: by default one token per head."""
        return 1 / max(1, geometry.schedule.persistent_tokens)

    def allocate(self, geometry: Geometry, budget: float, calibration=None) -> Allocation:
        """How much every head may hold at every scale, in tokens, for at most `budget` of the full
        cache; by default all heads the same."""
        return RegionAllocation(capacities.capacity(geometry, capacities.uniform(geometry, budget)))

    def inputs(self, geometry: Geometry, allocation: Allocation, image_index: np.ndarray) -> Any:
        """Arrays [K, L, ...] that `select` wants per scale and layer, for a batch of images; None
        if there are none."""
        return None

    def window_tokens(self, height: int, width: int) -> np.ndarray:
        """int [W]: which tokens of a scale of this map size (row-major) are the window queries;
        repetitions are allowed. By default spread evenly in raster order."""
        turn = (np.arange(self.needs.window) + 0.5) / self.needs.window
        return np.floor(turn * height * width).astype(np.int32)

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> Allocation:
        """This policy's selection on capacities int32 [K, L, N] that another policy has decided
        (composition).

        Raises:
          UserError: the contents of this policy are not a selection.
        """
        if type(self).select is Policy.select:
            raise UserError(
                f"policy {self.name!r} cannot select for another one: its contents are given by "
                f"its own allocation, not chosen by a score"
            )
        return RegionAllocation(capacity)

    def content(self) -> str | None:
        """What else decides the results, as text: for example the hash of a file named in the
        arguments."""
        return None

    def plan_lines(self, geometry: Geometry, calibration: Any = None) -> list[str]:
        """What a printed plan should say about this (prepared) policy."""
        return []

    def steady_tokens(self, geometry: Geometry, calibration: Any = None) -> int | None:
        """Tokens per head, summed over layers, that the policy's paper counts as its memory; None:
        those that the last scale sees."""
        return None

    def check_images(self, num_images: int) -> None:
        """Raise `UserError` if the policy cannot serve a run of this many images."""

    # --- device -----------------------------------------------------------------------------------

    def regroup(self, obs: Observation) -> Int[Array, "R N"]:
        """Assign heads to regions, once per image at the allocation's `regroup_scale`."""
        raise NotImplementedError

    def init_state(self, geometry: Geometry, rows: int) -> Any:
        """Pytree of arrays that every layer carries from scale to scale; None for none."""
        return None

    def update_state(self, obs: Observation) -> Any:
        """The state after this scale; called before `select`, which sees the result. A policy that
        overrides this is asked at every scale, the last one included."""
        return obs.state

    def select(self, obs: Observation) -> Bool[Array, "R N K"]:
        """Which live tokens to keep: at most `obs.capacity` per head. Traced and pure."""
        raise NotImplementedError


def per_layer(geometry: Geometry, values: Any) -> np.ndarray:
    """[K, L, ...]: the same values for every scale and layer, as `Policy.inputs` wants them."""
    shape = (geometry.schedule.num_scales, geometry.num_layers, *np.shape(values))
    return np.broadcast_to(values, shape)


def parse_value(name: str, text: str, kind: Any) -> Any:
    """Read one `--policy_args` value as the type of its field, which may be given by name."""
    read, _, wanted = _KINDS.get(_name_of(kind), (kind, None, str(kind)))
    if not isinstance(text, str):
        raise UserError(f"policy argument {name}={show(text)}: give its value as a text")
    try:
        return read(text)
    except (ValueError, KeyError):
        raise UserError(f"policy argument {name}={show(text)} is not {wanted}") from None


def _name_of(kind: Any) -> str:
    """`int` for the type and for its name, which annotations may be; `int | None` likewise."""
    if isinstance(kind, types.UnionType):
        return str(kind)
    return getattr(kind, "__name__", kind) if isinstance(kind, (type, str)) else ""


def _optional_integer(name: str, value: Any, **limits: Any) -> int | None:
    return None if value is None else arguments.integer(name, value, **limits)


_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_LIMITS = {
    kind: {"low": -LARGEST_INTEGER, "high": LARGEST_INTEGER} for kind in ("int", "int | None")
}
_KINDS = {  # how to read it from a text, how to check it, and what it is in words
    "int": (int, arguments.integer, "a whole number"),
    "int | None": (int, _optional_integer, "a whole number"),
    "float": (float, arguments.number, "a number"),
    "str": (str, arguments.text, "text"),
    "bool": (lambda text: _TRUTH[text.lower()], arguments.flag, "true or false"),
}
