"""The rule engine: rule tables say where every tensor of a checkpoint goes.

A rule table is a list of `Take`, `Ignore` and `Refuse`. Each source name matches exactly one entry.
Each target parameter, and each slot and section of it, is filled exactly once. All problems are
collected and reported in one error, first those of names and shapes, then those of values.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flax import nnx

from ported_weights.readers.sources import Tensor
from varjax.core.errors import UserError, some
from varjax.storage import parameters

TRANSFORMS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda a: a.transpose(1, 0),  # (out, in) -> (in, out)
    "conv": lambda a: a.transpose(2, 3, 1, 0),  # (out, in, kh, kw) -> (kh, kw, in, out)
    "conv1x1_to_linear": lambda a: a.reshape(a.shape[:2]).T,  # (out, in, 1, 1)
    "drop_axis": lambda a: a.squeeze(0),  # (1, ...) -> (...)
    "add_axis": lambda a: a[None],
    "flatten": lambda a: a.reshape(-1),
}
Stack = int | tuple[int, int, int]
Section = tuple[int, tuple[int, ...]]
MAX_LISTED = 100  # problems of one kind that a message shows
MAX_CHECKED = 2**27  # elements of the largest ignored tensor whose values are read


@dataclass(frozen=True)
class Take:
    r"""A tensor whose name matches `pattern` goes to the parameter `target`.

    Attributes:
      pattern: regular expression for the whole name.
      target: '/'-joined parameter path; `\1` stands for group 1 of the pattern.
      transform: a name of `TRANSFORMS`, or several that are applied in turn; None: no change.
      stack: the group whose number is the index on the leading axis of the target; or two groups
        and a size, (outer, inner, size), for the index outer * size + inner. None: no such axis.
      row_limit: name of the setting that says how many rows are taken. The source may have more
        rows, which are reported as ignored. None: shapes must be equal.
      rows: which rows of the source, one for each token, are taken, in this order. None: all.
      section: (i, shares): the source fills the i-th of the sections that lie side by side along
        the last axis of the target; their widths are in these proportions. None: all of it.
    """

    pattern: str
    target: str
    transform: str | tuple[str, ...] | None = None
    stack: Stack | None = None
    row_limit: str | None = None
    rows: tuple[int, ...] | None = None
    section: Section | None = None

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Take the rows and transform an array as the target needs it. `ValueError` or `IndexError`
        if its shape is unsuitable."""
        array = array if self.rows is None else array[np.asarray(self.rows)]
        names = self.transform or ()
        for name in (names,) if isinstance(names, str) else names:
            array = TRANSFORMS[name](array)
        return array

    def section_of(self, array: np.ndarray) -> np.ndarray:
        """Return a view of the section of the target's array that the source fills."""
        if self.section is None:
            return array
        number, shares = self.section
        first, end, whole = sum(shares[:number]), sum(shares[: number + 1]), sum(shares)
        width = array.shape[-1]
        return array[..., first * width // whole : end * width // whole]

    def slot(self, match: re.Match) -> int | None:
        """Return the index on the stacked axis, None for a target without one.

        It is -1, which no target has, where the inner number is too large.
        """
        if not isinstance(self.stack, tuple):
            return int(match[self.stack]) if self.stack else None
        (outer, inner), size = (int(match[group]) for group in self.stack[:2]), self.stack[2]
        return outer * size + inner if inner < size else -1

    def place(self, match: re.Match, tensor: Tensor, placement: "Placement") -> None:
        """Compare a tensor with its target by name and shape, and note the move."""
        name, target, slot = match.string, match.expand(self.target), self.slot(match)
        leaf = placement.targets.get(target)
        if leaf is None or (slot is not None and not 0 <= slot < leaf.shape[0]):
            placement.problems.append(
                f"surplus: {name} {list(tensor.shape)} (the configuration has no place for it)"
            )
            return
        placement.moves.append((name, self, target, slot))
        self._check_shape(name, tensor, leaf.shape if slot is None else leaf.shape[1:], placement)
        if parameters.is_floating(tensor.dtype) != parameters.is_floating(leaf.dtype):
            problem = f"wrong type: {name} is {tensor.dtype}, not {leaf.dtype}"
            placement.problems.append(problem)

    def _check_shape(
        self, name: str, tensor: Tensor, whole: Sequence[int], placement: "Placement"
    ) -> None:
        """Note rows that are not taken, or a wrong shape. whole: the shape of the target's slot."""
        wanted = self.section_of(np.broadcast_to(np.int8(0), tuple(whole))).shape
        try:  # of one number that stands for all: no values are read
            shape = self.apply(np.broadcast_to(np.int8(0), tensor.shape)).shape
        except (ValueError, IndexError):
            shape = None
        if self.rows is not None and shape == wanted and len(self.rows) < tensor.shape[0]:
            left = f"{tensor.shape[0] - len(self.rows)} of {tensor.shape[0]} rows of {name}"
            placement.ignored.append((left, "tokens that no image has"))
        may_differ = self.row_limit and shape and shape[1:] == wanted[1:]
        if may_differ and shape[0] > wanted[0]:
            reason = f"only the first {wanted[0]} are used: {self.row_limit} is {wanted[0]}"
            placement.ignored.append((f"rows {wanted[0]} to {shape[0] - 1} of {name}", reason))
        elif shape != wanted:
            expected = f"but {list(wanted)} is expected"
            if may_differ:
                expected += f": set {self.row_limit} to {shape[0]} or less"
            elif shape is None:
                expected += f" after {self.transform!r}"
                expected += f" of {len(self.rows)} rows up to {max(self.rows)}" if self.rows else ""
            elif self.transform:
                expected = f"which becomes {list(shape)} instead of {list(wanted)}"
            placement.problems.append(f"wrong shape: {name} is {list(tensor.shape)}, {expected}")

    def source_name(self, target: str, slot: int | None = None) -> str | None:
        r"""Return the published name that goes into a slot of `target`; None if there is none.

        The rule's target is matched backwards, where `\N` stands for one path entry. The groups
        found are put into the pattern. The rule is for `target` only if its pattern matches the
        name that results.
        """
        match = re.fullmatch(re.sub(r"\\(\d)", r"(?P<g\1>[^/]+)", self.target), target)
        if not match:
            return None
        groups = {int(k[1:]): v for k, v in match.groupdict().items()}
        if isinstance(self.stack, tuple):  # the inverse of `slot`
            outer, inner, size = self.stack
            groups |= {outer: str((slot or 0) // size), inner: str((slot or 0) % size)}
        elif self.stack:
            groups[self.stack] = str(slot or 0)
        values = iter([groups.get(i, "*") for i in range(1, 100)])
        name = re.sub(r"\([^()]*\)", lambda _: next(values), self.pattern).replace(r"\.", ".")
        return name if re.fullmatch(self.pattern, name) else None


def linear(pattern: str, target: str, stack: Stack | None = None) -> list[Take]:
    """Return the rules for weight and bias of a linear layer."""
    return layer(pattern, target, "kernel", "linear", stack)


def product(
    pattern: str, target: str, stack: Stack | None = None, section: Section | None = None
) -> Take:
    """Return the rule for a linear layer without bias."""
    return Take(rf"{pattern}\.weight", f"{target}/kernel", "linear", stack, section=section)


def layer(
    pattern: str,
    target: str,
    weight: str,
    transform: str | None,
    stack: Stack | None = None,
    section: Section | None = None,
) -> list[Take]:
    """Return the rules for weight and bias of a layer. weight: what the target calls the weight."""
    return [
        Take(rf"{pattern}\.weight", f"{target}/{weight}", transform, stack, section=section),
        Take(rf"{pattern}\.bias", f"{target}/bias", None, stack, section=section),
    ]


@dataclass(frozen=True)
class Ignore:
    """A tensor whose name matches `pattern` is not needed.

    reason: why. check: function of its values that returns an objection, or None. same_as: the
    tensor that it has to equal bit for bit, as `reason` says.
    """

    pattern: str
    reason: str
    check: Callable[[np.ndarray], str | None] | None = None
    same_as: Tensor | None = None

    def place(self, match: re.Match, tensor: Tensor, placement: "Placement") -> None:
        """Note the tensor as ignored; its values are read only for `check`."""
        name, shape = match.string, tensor.shape
        placement.ignored.append((name, self.reason))
        if self.check is not None and math.prod(shape) > MAX_CHECKED:
            problem = f"wrong shape: {name} is implausibly large: {list(shape)}"
            placement.problems.append(problem)
        elif self.check is not None and (objection := self.check(tensor.read())):
            placement.problems.append(f"wrong value: {name} {objection}")
        if (other := self.same_as) is not None:
            differ = (tensor.shape, tensor.dtype) != (other.shape, other.dtype)
            rows = (np.atleast_1d(t.read()) for t in (tensor, other))
            if differ or any(a.tobytes() != b.tobytes() for a, b in zip(*rows, strict=True)):
                problem = f"{name} is not {self.reason}, they differ: keep the one that is used"
                placement.problems.append(f"wrong value: {problem}")


@dataclass(frozen=True)
class Refuse:
    """A tensor whose name matches `pattern` contradicts the configuration. reason: how."""

    pattern: str
    reason: str

    def place(self, match: re.Match, tensor: Tensor, placement: "Placement") -> None:
        """Note the contradiction."""
        placement.problems.append(f"surplus: {match.string} ({self.reason})")


Entry = Take | Ignore | Refuse


def path_of(pattern: str) -> str:
    """Return the target with the source's name: '/' replaces '.', and `\\1` the first group.

    The `conv` inside a resampling layer is left out, as in the modules here.
    """
    numbers = itertools.count(1)
    target = re.sub(r"\([^()]*\)", lambda _: rf"\{next(numbers)}", pattern)
    return target.replace(r"\.", "/").removesuffix("/conv")


def zero_key_bias(prefix: str, model: str) -> Ignore:
    """Ignore the buffer that published attention adds to its keys, which have no bias."""
    objection = f"must be zero: keys have no bias in {model}"
    pattern = rf"{prefix}\.zero_k_bias"
    return Ignore(pattern, "constant zeros", lambda a: objection if np.any(a) else None)


@dataclass
class Placement:
    """Places of tensors, by names and shapes.

    Attributes:
      targets: {path: leaf}, the parameters that have to be filled.
      moves: (name of a tensor, its rule, path, index on the leading axis there or None) for each
        tensor that has a place.
      ignored: (what is ignored, reason).
      problems: each in one line that begins with its kind, such as `missing: `.
    """

    targets: Mapping
    moves: list[tuple[str, Take, str, int | None]] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def match(self, rules: Sequence[Entry], tensors: Mapping[str, Tensor]) -> None:
        """Let the one entry that matches each name place its tensor."""
        compiled = [(re.compile(rule.pattern, re.ASCII), rule) for rule in rules]  # \d is 0 to 9
        for name, tensor in tensors.items():
            found = [(m, rule) for regex, rule in compiled if (m := regex.fullmatch(name))]
            if len(found) == 1:
                match, rule = found[0]
                rule.place(match, tensor, self)
            else:
                count = f"{len(found)} rules match" if found else "no rule for it"
                self.problems.append(f"surplus: {name} {list(tensor.shape)} ({count})")

    def check_coverage(self, rules: Sequence[Entry]) -> None:
        """Note targets, slots and sections that are not filled exactly once."""
        sources: dict[tuple, list[str]] = {}
        for name, rule, target, slot in self.moves:
            sources.setdefault((target, slot, rule.section), []).append(name)
        for (target, *_), names in sources.items():
            if len(names) > 1:
                self.problems.append(f"given twice: {target} by {' and '.join(sorted(names))}")
        for target, leaf in self.targets.items():
            makers = [r for r in rules if isinstance(r, Take) and r.source_name(target)]
            if not makers:
                self.problems.append(f"missing: {target} (no rule leads to it)")
                continue
            slots = (None,) if makers[0].stack is None else range(leaf.shape[0])
            first = {rule.section: rule for rule in reversed(makers)}
            for slot, (section, rule) in itertools.product(slots, first.items()):
                if (target, slot, section) not in sources:
                    self.problems.append(f"missing: {rule.source_name(target, slot)}")

    def dtypes(self, tensors: Mapping[str, Tensor], dtype: str | None) -> dict[str, np.dtype]:
        """Choose the type of every parameter: `dtype`, or its sources', float32 if they differ."""
        types: dict[str, np.dtype] = {}
        for name, _, target, _ in self.moves:
            given = tensors[name].dtype
            if given == np.float64 or given.kind in "iub":  # integers take the module's type
                given = np.dtype(self.targets[target].dtype)
            if dtype is not None and parameters.is_floating(given):
                given = np.dtype(dtype)
            if types.setdefault(target, given) != given:
                types[target] = np.dtype(np.float32)
        return types


def apply(
    rules: Sequence[Entry],
    tensors: Mapping[str, Tensor],
    module: nnx.Module,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dtype: str | None = None,
) -> tuple[nnx.Module, Placement]:
    """Fill `module` (usually abstract) with host arrays, read from `tensors` in file order.
    `UserError` lists everything that is missing, surplus, misshapen, given twice or not finite.

    Floating parameters are stored as `dtype`. Without it they keep the source's type, but float64
    becomes float32, and a stack of several types becomes float32.

    Returns the filled module and where its arrays came from.
    """
    placement = check(rules, tensors, parameters.named(module))
    types = placement.dtypes(tensors, dtype)
    arrays: dict[str, np.ndarray] = {}
    for done, (name, rule, target, slot) in enumerate(placement.moves, 1):
        if target not in arrays:
            arrays[target] = np.empty(placement.targets[target].shape, types[target])
        into = rule.section_of(arrays[target] if slot is None else arrays[target][slot])
        array = rule.apply(tensors[name].read())
        into[...] = array[: len(into)] if rule.row_limit else array
        if bad := np.count_nonzero(~np.isfinite(into)):
            problem = f"not finite: {name} has {bad} values that are NaN or infinite"
            placement.problems.append(problem)
        progress(done, len(placement.moves))
    _report(placement.problems)
    return parameters.fill(module, arrays), placement


def check(rules: Sequence[Entry], tensors: Mapping[str, Tensor], targets: Mapping) -> Placement:
    """Say where tensors go in {path: leaf}, by names and shapes. `UserError` as in `apply`."""
    placement = Placement(targets)
    placement.match(rules, tensors)
    placement.check_coverage(rules)
    _report(placement.problems)
    return placement


def _report(problems: Sequence[str]) -> None:
    def natural(text: str) -> list:  # blocks.2 before blocks.10; too long numbers are no `int`
        parts = re.split(r"([0-9]+)", text)
        return [(1, 0, p) if i % 2 == 0 else (0, len(p), p) for i, p in enumerate(parts)]

    if problems:
        order = sorted(problems, key=natural)
        kinds = itertools.groupby(order, key=lambda text: text.partition(":")[0])
        listed = [some(of_kind, MAX_LISTED, between="\n  ") for _, of_kind in kinds]
        count = f"{len(order)} problem{'s'[len(order) == 1 :]}"
        raise UserError(f"{count}:\n  " + "\n  ".join(listed))
