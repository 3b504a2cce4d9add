"""The rule engine: tables that say where every tensor of a checkpoint goes.

A table is a list of `Rule`, `Ignore` and `Refuse`. Each source name matches exactly one entry;
each target parameter, and each slot and section of it, is filled exactly once. Everything that is
wrong is collected and reported in one error, first by names and shapes alone, then by values.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flax import nnx

from varjax.errors import UserError, some
from varjax.nn import parameters

TRANSFORMS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda a: a.transpose(1, 0),  # (out, in) -> (in, out)
    "conv": lambda a: a.transpose(2, 3, 1, 0),  # (out, in, kh, kw) -> (kh, kw, in, out)
    "conv1x1_to_linear": lambda a: a[:, :, 0, 0].T if a.shape[2:] == (1, 1) else _no(),
    "drop_axis": lambda a: a[0] if a.shape[:1] == (1,) else _no(),  # (1, ...) -> (...)
    "add_axis": lambda a: a[None],
    "flatten": lambda a: a.reshape(-1),
}
Stack = int | tuple[int, int, int]
MAX_LISTED = 100  # problems of a kind that a message shows
MAX_CHECKED = 2**27  # elements of an ignored tensor whose values are checked


@dataclass(frozen=True)
class Rule:
    r"""Source names that match `pattern` go to the parameter `target`.

    Attributes:
      pattern: regular expression for the whole name.
      target: '/'-joined parameter path; `\1` stands for group 1 of the pattern.
      transform: None, a name of `TRANSFORMS`, or several that are applied in turn.
      stack: the group whose number is the index on the leading axis of the target; or two groups
        and a size, (outer, inner, size), for the index outer * size + inner; or None.
      row_limit: name of the setting that says how many rows are taken: the source may have more,
        which are reported as ignored. None: shapes must be equal.
      section: (i, n): the source is the i-th of n equal sections, side by side along the last axis
        of the target; None: it is all of it.
    """

    pattern: str
    target: str
    transform: str | tuple[str, ...] | None = None
    stack: Stack | None = None
    row_limit: str | None = None
    section: tuple[int, int] | None = None

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The array as the target has it. `ValueError` if its shape is unsuitable."""
        names = self.transform or ()
        for name in (names,) if isinstance(names, str) else names:
            array = TRANSFORMS[name](array)
        return array

    def part_of(self, array):
        """Where the source goes in an array as the target has it: a view of its section."""
        number, count = self.section or (0, 1)
        width = array.shape[-1] // count
        return array[..., number * width : (number + 1) * width] if count > 1 else array

    def slot(self, match: re.Match) -> int | None:
        """Index on the stacked axis, None for a target without one; -1, which is no index, where
        an inner number is too large."""
        if not isinstance(self.stack, tuple):
            return int(match[self.stack]) if self.stack else None
        (outer, inner), size = (int(match[group]) for group in self.stack[:2]), self.stack[2]
        return outer * size + inner if inner < size else -1

    def groups(self, slot: int) -> dict[int, str]:
        """What the pattern's groups say for an index: the inverse of `slot`."""
        if not isinstance(self.stack, tuple):
            return {self.stack: str(slot)} if self.stack else {}
        outer, inner, size = self.stack
        return {outer: str(slot // size), inner: str(slot % size)}


def linear(pattern: str, target: str, stack: Stack | None = None) -> list[Rule]:
    """Weight and bias of a linear layer."""
    return layer(pattern, target, "kernel", "linear", stack)


def layer(
    pattern: str, target: str, weight: str, transform, stack=None, section=None
) -> list[Rule]:
    """Weight and bias of a layer; `weight` is the name of the first here."""
    return [
        Rule(rf"{pattern}\.weight", f"{target}/{weight}", transform, stack, section=section),
        Rule(rf"{pattern}\.bias", f"{target}/bias", None, stack, section=section),
    ]


@dataclass(frozen=True)
class Ignore:
    """Source names that are not needed, and why. `check` may look at the values and object."""

    pattern: str
    reason: str
    check: Callable[[np.ndarray], str | None] | None = None


def path_of(pattern: str) -> str:
    """The target that is called as the source, '/' for '.', each group of the pattern in its place.
    The `conv` inside a resampling layer is left out, as in the modules here."""
    numbers = itertools.count(1)
    target = re.sub(r"\([^()]*\)", lambda _: rf"\{next(numbers)}", pattern)
    return target.replace(r"\.", "/").removesuffix("/conv")


def zero_key_bias(prefix: str, model: str) -> Ignore:
    """The buffer that published attention adds to its keys, which have no bias."""
    objection = f"must be zero: keys have no bias in {model}"
    pattern = rf"{prefix}\.zero_k_bias"
    return Ignore(pattern, "constant zeros", lambda a: objection if np.any(a) else None)


@dataclass(frozen=True)
class Refuse:
    """Source names that contradict the configuration, and how."""

    pattern: str
    reason: str


@dataclass
class Placement:
    """Where tensors go, by names and shapes: (source name, rule, target, slot), ignored names with
    the reason, problems."""

    moves: list[tuple[str, Rule, str, int | None]] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def apply(
    rules: Sequence,
    tensors: Mapping,
    module: nnx.Module,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dtype=None,
) -> tuple[nnx.Module, Placement]:
    """`module` (usually abstract) filled from `tensors`, {name: lazy tensor}, in file order: host
    arrays, and where they came from. `UserError` lists everything that is missing, surplus,
    misshapen, given twice or not finite.

    Floating parameters get `dtype`, as they are read; without it they keep the source's type
    (float64 becomes float32), stacked ones the widest.
    """
    targets = parameters.named(module)
    placement = check(rules, tensors, targets)
    types = _types(placement, tensors, targets, dtype)
    arrays: dict[str, np.ndarray] = {}
    for done, (name, rule, target, slot) in enumerate(placement.moves, 1):
        if target not in arrays:
            arrays[target] = np.empty(targets[target].shape, types[target])
        into = rule.part_of(arrays[target] if slot is None else arrays[target][slot])
        array = rule.apply(tensors[name].read())
        into[...] = array[: len(into)] if rule.row_limit else array
        if bad := np.count_nonzero(~np.isfinite(into)):
            problem = f"not finite: {name} has {bad} values that are NaN or infinite"
            placement.problems.append(problem)
        progress(done, len(placement.moves))
    _report(placement.problems)
    return parameters.fill(module, arrays), placement


def check(rules: Sequence, tensors: Mapping, targets: Mapping) -> Placement:
    """The first half of `apply`, by names and shapes: where every tensor goes in {name: leaf}."""
    placement = _match(rules, tensors, targets)
    _check_coverage(placement, rules, targets)
    _report(placement.problems)
    return placement


def _report(problems: Sequence[str]) -> None:
    if problems:
        order = sorted(problems, key=_natural)
        kinds = itertools.groupby(order, key=lambda text: text.partition(":")[0])
        listed = [some(of_kind, MAX_LISTED, between="\n  ") for _, of_kind in kinds]
        raise UserError(f"{len(order)} problems:\n  " + "\n  ".join(listed))


def _natural(text: str) -> list:
    """Sort key by which blocks.2 comes before blocks.10. Numbers may be too long for `int`."""
    parts = re.split(r"([0-9]+)", text)
    return [(1, 0, p) if i % 2 == 0 else (0, len(p), p) for i, p in enumerate(parts)]


# --- names and shapes -----------------------------------------------------------------------------


def _match(rules: Sequence, tensors: Mapping, targets: Mapping) -> Placement:
    placement = Placement()
    compiled = [(re.compile(rule.pattern, re.ASCII), rule) for rule in rules]  # \d is 0 to 9
    for name, tensor in tensors.items():
        found = [(m, rule) for regex, rule in compiled if (m := regex.fullmatch(name))]
        if len(found) != 1:
            count = f"{len(found)} rules match" if found else "no rule for it"
            placement.problems.append(f"surplus: {name} {list(tensor.shape)} ({count})")
            continue
        match, rule = found[0]
        if isinstance(rule, Refuse):
            placement.problems.append(f"surplus: {name} ({rule.reason})")
        elif isinstance(rule, Ignore):
            placement.ignored.append((name, rule.reason))
            if rule.check is not None and math.prod(tensor.shape) > MAX_CHECKED:
                shape = list(tensor.shape)
                placement.problems.append(f"wrong shape: {name} is implausibly large: {shape}")
            elif rule.check is not None and (objection := rule.check(tensor.read())):
                placement.problems.append(f"wrong value: {name} {objection}")
        else:
            _place(placement, name, rule, match, tensor, targets)
    return placement


def _place(
    placement: Placement, name: str, rule: Rule, match: re.Match, tensor, targets: Mapping
) -> None:
    """Check one source tensor against its target and note the move."""
    target = match.expand(rule.target)
    slot = rule.slot(match)
    leaf = targets.get(target)
    if leaf is None or (slot is not None and not 0 <= slot < leaf.shape[0]):
        placement.problems.append(
            f"surplus: {name} {list(tensor.shape)} (the configuration has no place for it)"
        )
        return
    placement.moves.append((name, rule, target, slot))
    whole = tuple(leaf.shape if slot is None else leaf.shape[1:])
    wanted = rule.part_of(np.broadcast_to(np.int8(0), whole)).shape
    shape = _shape(rule, tensor)
    may_differ = rule.row_limit and shape and shape[1:] == wanted[1:]
    if may_differ and shape[0] > wanted[0]:
        reason = f"only the first {wanted[0]} are used: {rule.row_limit} is {wanted[0]}"
        placement.ignored.append((f"rows {wanted[0]} to {shape[0] - 1} of {name}", reason))
    elif shape != wanted:
        expected = f"but {list(wanted)} is expected"
        if may_differ:
            expected += f": set {rule.row_limit} to {shape[0]} or less"
        elif shape is None:
            expected += f" after {rule.transform!r}"
        elif rule.transform:
            expected = f"which becomes {list(shape)} instead of {list(wanted)}"
        placement.problems.append(f"wrong shape: {name} is {list(tensor.shape)}, {expected}")
    if parameters.is_floating(tensor.dtype) != parameters.is_floating(leaf.dtype):
        placement.problems.append(f"wrong type: {name} is {tensor.dtype}, not {leaf.dtype}")


def _shape(rule: Rule, tensor) -> tuple[int, ...] | None:
    """Shape after the rule's transform, without reading values; None if it cannot be applied."""
    try:
        return rule.apply(np.broadcast_to(np.int8(0), tensor.shape)).shape
    except (ValueError, IndexError):
        return None


def _check_coverage(placement: Placement, rules: Sequence, targets: Mapping) -> None:
    """Every target, and every slot and section of it, once."""
    sources: dict[tuple, list[str]] = {}
    for name, rule, target, slot in placement.moves:
        sources.setdefault((target, slot, rule.section), []).append(name)
    for (target, *_), names in sources.items():
        if len(names) > 1:
            placement.problems.append(f"given twice: {target} by {' and '.join(sorted(names))}")
    for target, leaf in targets.items():
        makers = [rule for rule in rules if isinstance(rule, Rule) and _source_name(rule, target)]
        if not makers:
            placement.problems.append(f"missing: {target} (no rule leads to it)")
            continue
        slots = (None,) if makers[0].stack is None else range(leaf.shape[0])
        first = {rule.section: rule for rule in reversed(makers)}
        for slot, (section, rule) in itertools.product(slots, first.items()):
            if (target, slot, section) not in sources:
                placement.problems.append(f"missing: {_source_name(rule, target, slot)}")


@functools.cache
def _backwards(target: str) -> re.Pattern:
    return re.compile(re.sub(r"\\(\d)", r"(?P<g\1>[^/]+)", target))


def _source_name(rule: Rule, target: str, slot: int | None = None) -> str | None:
    r"""The published name that a rule would put into a slot of `target`; None if it never does.

    The rule's target is matched backwards, `\N` standing for one path entry, and the groups found
    are put into its pattern; if the pattern does not match that name, the rule is not for `target`.
    """
    match = _backwards(rule.target).fullmatch(target)
    if not match:
        return None
    groups = {int(k[1:]): v for k, v in match.groupdict().items()} | rule.groups(slot or 0)
    values = iter([groups.get(i, "*") for i in range(1, 100)])
    name = re.sub(r"\([^()]*\)", lambda _: next(values), rule.pattern).replace(r"\.", ".")
    return name if re.fullmatch(rule.pattern, name) else None


# --- values ---------------------------------------------------------------------------------------


def _types(placement: Placement, tensors: Mapping, targets: Mapping, dtype) -> dict[str, np.dtype]:
    """Type of every parameter: `dtype`, or that of its sources, the widest if they differ."""
    types: dict[str, np.dtype] = {}
    for name, _, target, _ in placement.moves:
        given = tensors[name].dtype
        if given == np.float64 or given.kind in "iub":  # integers take the module's type
            given = np.dtype(targets[target].dtype)
        if dtype is not None and parameters.is_floating(given):
            given = np.dtype(dtype)
        if types.setdefault(target, given) != given:
            types[target] = np.dtype(np.float32)
    return types


def _no():
    raise ValueError("the shape does not fit the transform")
