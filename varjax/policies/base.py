"""A policy is a name and arguments. For each kind of model that it serves it has a `Rule`: how many
tokens heads hold, and which ones if that depends on the image.

A policy is a frozen dataclass in one file; its fields are the `--policy_args`, its docstring is its
manual. It never moves bytes.
"""

import dataclasses
from dataclasses import dataclass, fields
from typing import ClassVar, NoReturn, TypeVar

import numpy as np
from jax.typing import ArrayLike

from varjax import arguments
from varjax.cache.allocation import Allocation, Geometry, RegionAllocation
from varjax.cache.observation import Needs  # noqa: F401 - users take it from here
from varjax.calibration.data import Calibration
from varjax.errors import UserError, about, nearest, show
from varjax.policies import capacities
from varjax.policies.rule import Rule
from varjax.sequence import SCALES, TOKENS

BUDGET = {  # its range, and what a message about it says
    "low": 0,
    "high": 1,
    "above": True,
    "note": ": it is the fraction of the full cache's bytes that may be kept",
}
LARGEST_INTEGER = 2**31 - 1  # of a field that says no range
CONTENTS_FOLLOW = "its contents are not chosen by a score, they follow from its own"
CALIBRATE = "a calibration (`python -m experiments.calibrate` writes one)"
Value = TypeVar("Value")  # a field's default, which type checkers see in place of its declaration


class NotGiven(float):
    """A default that can be told from the same number given by the user."""


def within(default: Value, low: float, high: float, **more: bool | str) -> Value:
    """Declares a numeric field with a range from `low` to `high`. The range is the same for all
    models. more: further arguments of `arguments.number`."""
    return dataclasses.field(
        default=default, metadata={"limits": {"low": low, "high": high} | more}
    )


def only_for(kind: str, default: Value) -> Value:
    """Declares a field of a policy that only models of one kind have a use for; given for others it
    is refused. default: its default, or its declaration (`within`)."""
    if not isinstance(default, dataclasses.Field):
        default = dataclasses.field(default=default)
    metadata = {**default.metadata, "only_for": kind}
    return dataclasses.field(default=default.default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Policy(Rule):
    """Base of all policies: what they are called and what they are given.

    A policy that says nothing else is its own rule for models that draw scale by scale: a decision
    is made after every scale; a head is in the region of its number until `regroup` (int32 [R, N],
    regions of the layer) assigns heads anew at the allocation's `regroup_scale`. A policy that
    derives from `token_rule.TokenPolicy` is its own rule for models that draw token by token; one
    for both names its rule for the latter in `token_rule`.

    Args:
      budget: fraction of the dense persistent bytes, in (0, 1].
      accounting: "bytes" charges block rounding to the budget; "tokens" counts as the papers do.
      block_size: slots per block, a power of two; 0 lets the planner choose.
    """

    budget: float = 1.0
    accounting: str = "bytes"
    block_size: int = 0
    # what `prepare` was given, for policies whose sizes follow from it
    _calibration: Calibration | None = dataclasses.field(default=None, repr=False, compare=False)

    kind = SCALES
    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    token_rule: ClassVar[type[Rule] | None] = None  # the rule for models that draw token by token
    unsuited: ClassVar[str] = "it decides about whole scales, of which those have none"
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
    # roles that a composition refuses to give it, "allocate" or "select", each with the reason
    unfit_roles: ClassVar[dict[str, str]] = {}
    contents: ClassVar[str] = ""  # for tables, where it is not simply "decided per image" or not
    names_files: ClassVar[tuple[str, ...]] = ()  # arguments that name files of this machine
    smallest_reason: ClassVar[str] = "every head needs room for at least one token"
    # argument sets that the generic tests take, the defaults first
    examples: ClassVar[tuple[dict[str, str], ...]] = ({},)

    # --- arguments --------------------------------------------------------------------------------

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
        """Checks the type of every field that is a number, a text or a truth value, and its range
        (`within`).

        Raises:
          UserError: naming the policy and the field.
        """
        whole = {"low": -LARGEST_INTEGER, "high": LARGEST_INTEGER}
        for name, kind in {"budget": "float", **self.argument_types()}.items():
            f, value = self.__dataclass_fields__[name], getattr(self, name)
            if value is None and kind.endswith("None"):
                continue
            usual = BUDGET if name == "budget" else whole if kind.startswith("int") else {}
            with about(f"policy {self.name!r}"):
                value = _KINDS[kind][1](name, value, **f.metadata.get("limits", usual))
            object.__setattr__(self, name, value)
        if self.accounting not in ("bytes", "tokens"):
            raise UserError(f"accounting={show(self.accounting)}: choose bytes or tokens")

    @classmethod
    def argument_types(cls) -> dict[str, str]:
        """The `--policy_args` and their types: all fields of types that a text can give, but the
        budget and those with a leading underscore."""
        # an annotation is a type, several of them, or their text
        types = {f.name: f.type for f in fields(cls)}
        kinds = {n: t.__name__ if isinstance(t, type) else str(t) for n, t in types.items()}
        return {n: k for n, k in kinds.items() if n != "budget" and n[0] != "_" and k in _KINDS}

    @classmethod
    def from_arguments(cls, arguments: dict[str, str]) -> dict[str, object]:
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
        found = {}
        for name, text in arguments.items():
            read, _, wanted = _KINDS[known[name]]
            try:
                found[name] = read(text)
            except (ValueError, KeyError):
                raise UserError(f"policy argument {name}={show(text)} is not {wanted}") from None
        return found

    @classmethod
    def open_arguments(cls) -> dict[str, str]:
        """The arguments that strangers may give (requests to a server) and their types: numbers and
        truth values, and texts that name no file, of policies whose texts we know."""
        known, closed = cls.argument_types(), cls.names_files
        texts = cls.__module__.startswith("varjax.policies.")
        return {n: k for n, k in known.items() if n not in closed and (texts or k != "str")}

    def changed_by(self, given: dict[str, str], budget: float | None = None) -> "Policy":
        """The policy with other arguments, as strangers give them, and another budget. `UserError`
        for arguments that are not theirs to give."""
        known = self.open_arguments()
        for name in sorted(set(given) - set(known)):
            words = f"policy {self.name!r} takes no argument {show(name)} from requests"
            raise UserError(f"{words}{nearest(name, known)}; it takes: {', '.join(known)}")
        changed = self.from_arguments(given)
        return dataclasses.replace(self, **changed | ({} if budget is None else {"budget": budget}))

    def told(self) -> dict[str, object]:
        """The open arguments that differ from their defaults."""
        own = [f for f in fields(self) if f.name in self.open_arguments()]
        return {f.name: v for f in own if (v := getattr(self, f.name)) != f.default}

    def refuse(self, reason: str) -> NoReturn:
        raise UserError(f"policy {self.name!r}: {reason}")

    def require(self, name: str, fits: bool, rule: str) -> None:
        """Refuses the value of argument `name` unless it fits; `rule` goes on after
        `name=value`."""
        if not fits:
            self.refuse(f"{name}={getattr(self, name)}{rule}")

    def refuse_more(self, geometry: Geometry, budget: float, held: float, what: str) -> None:
        """Refuses contents that hold more tokens, in all layers and heads, than the budget."""
        share = held / max(1, geometry.dense_tokens)
        if share > budget + 1e-9:
            self.refuse(
                f"{what} keeps up to {share:.4f} of the full cache, more than budget={budget:g}: "
                f"keep less, leave the budget out, or give budget={np.ceil(share * 1e4) / 1e4:g}"
            )

    def measured(
        self,
        calibration: Calibration | None,
        name: str,
        geometry: Geometry,
        *,
        what: str,
        give: str = CALIBRATE,
    ) -> np.ndarray:
        """float64: measurement `name` of this model, which the policy cannot do without.

        Raises:
          UserError: `what` the policy has to know is not there, with what to `give` for it.
        """
        if getattr(calibration, name, None) is None:
            lacks = "" if calibration is None else f", and the calibration holds no {name}"
            raise UserError(f"policy {self.name!r} needs to know {what}{lacks}: give {give}")
        calibration.check(geometry)
        return np.asarray(getattr(calibration, name), np.float64)

    # --- rules ------------------------------------------------------------------------------------

    policy = property(lambda self: self)  # the policy is a rule itself, of its own arguments

    @classmethod
    def serves(cls, kind: str) -> bool:
        """Whether it has a rule for models that draw this at a time: "scales" or "tokens"."""
        return kind in (cls.kind, getattr(cls.token_rule, "kind", None))

    def rule(self, kind: str) -> Rule:
        """The policy's rule for models that draw `kind` (`Geometry.kind`) at a time.

        Raises:
          UserError: it does not serve such models, or was given an argument that only others have
            a use for.
        """
        draws = {SCALES: "scale by scale", TOKENS: "token by token"}
        rules = {rule.kind: rule for rule in (type(self), self.token_rule) if rule is not None}
        if kind not in rules:
            self.refuse(f"it does not serve models that draw {draws[kind]}: {self.unsuited}")
        for f in fields(self):
            other = f.metadata.get("only_for", kind)
            if other != kind:
                rule = f" is for models that draw {draws[other]}, this one draws {draws[kind]}"
                self.require(f.name, getattr(self, f.name) == f.default, f"{rule}: leave it out")
        return self if isinstance(self, rules[kind]) else rules[kind](self)

    # --- the rule for models that draw scale by scale ---------------------------------------------

    def minimum_budget(self, geometry: Geometry) -> float:
        """By default one token per head."""
        return 1 / max(1, geometry.schedule.persistent_tokens)

    def least(self, geometry: Geometry) -> str:
        return self.smallest_reason

    def allocate(self, geometry: Geometry, budget: float) -> Allocation:
        """The room of every head at every scale, in tokens."""
        return RegionAllocation(capacities.capacity(geometry, capacities.uniform(geometry, budget)))

    def window_tokens(self, height: int, width: int) -> np.ndarray:
        """int [W]: which tokens of a scale of this map size (row-major) are the window queries;
        repetitions are allowed. By default spread evenly in raster order."""
        turn = (np.arange(self.needs.window) + 0.5) / self.needs.window
        return np.floor(turn * height * width).astype(np.int32)

    def known_capacity(self, geometry: Geometry, budget: float) -> np.ndarray | None:
        """int32 [K, L, N]: what heads hold when each scale starts, for compositions; None where
        that is decided while generating."""
        given = self.allocate(geometry, budget)
        region = isinstance(given, RegionAllocation)
        if region and (given.ragged or given.regroup_scale is not None):
            return None
        return given.capacity(geometry)

    def adopt(self, geometry: Geometry, budget: float, capacity: np.ndarray) -> Allocation:
        """The allocation with which `select` fills capacities int32 [K, L, N] that another policy
        has decided (compositions).

        Raises:
          UserError: the contents of this policy are not a selection.
        """
        if not self.selects:
            raise UserError(
                f"policy {self.name!r} cannot select for another one: its contents are given by "
                f"its own allocation, not chosen by a score"
            )
        return RegionAllocation(capacity)

    # --- what runs ask ----------------------------------------------------------------------------

    def content(self) -> str | None:
        """Further input that decides the results, as text: for example the hash of a file named in
        the arguments."""
        return None

    def check_images(self, num_images: int) -> None:
        """Raises `UserError` if the policy cannot serve a run of this many images."""


def per_layer(geometry: Geometry, values: ArrayLike) -> np.ndarray:
    """[K, L, ...]: the same values for every scale and layer, as `Rule.inputs` wants them."""
    shape = (geometry.schedule.num_scales, geometry.num_layers, *np.shape(values))
    return np.broadcast_to(values, shape)


_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_KINDS = {  # how to read it from a text, how to check it, and what it is in words
    "int": (int, arguments.integer, "a whole number"),
    "int | None": (int, arguments.integer, "a whole number"),
    "float": (float, arguments.number, "a number"),
    "str": (str, arguments.text, "text"),
    "bool": (lambda text: _TRUTH[text.lower()], arguments.flag, "true or false"),
}
