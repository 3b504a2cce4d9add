"""Buffers of a compiled program by name: what the compiler placed where, and when it lives.

XLA writes its buffer assignment and live ranges as text when asked to dump (`DUMP_OPTIONS`); both
the GPU and the TPU compiler do. From these two and the compiled text follow

- the temporaries that are alive when temporaries take most memory, with the operation in our
  sources that made them (the scopes encode_condition, embed, project, attend, post_attention,
  sample, accumulate are those of `varjax.engine.scales`);
- whether the KV pool and the other large arrays of the cache exist once: copies of them, and
  buffers of their shape outside the donated argument.

Only the device's main memory counts; a TPU's VMEM is another space.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

DUMP_OPTIONS = {"xla_dump_hlo_as_text": True}
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*):$")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>\S+?)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$"
)
_RANGE = re.compile(r"^    (?P<name>\S+?)\{(?P<index>[\d,]*)\}:(?P<first>\d+)-(?P<last>\d+)$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?(?P<line>%?(?P<name>[\w.\-]+) = (?P<shape>.*?) "
    r"(?P<operation>[a-z][\w\-]*)\((?:%?(?P<operand>[\w.\-]+))?.*)$"
)
_MOVES = {"copy", "copy-start", "copy-done", "transpose", "bitcast", "reshape", "convert"}
_NEW_ARRAYS = {"copy", "copy-start", "transpose", "convert"}  # moves that write a second array
_SILENT = {"bitcast", "copy-done"}  # say nothing that their operand does not say


@dataclass(frozen=True)
class Buffer:
    """One value of the program.

    name: of the instruction. size, offset: bytes in its allocation. shape: as XLA writes it.
    first, last: positions in the instruction sequence between which it lives, if known.
    source: the operation of our sources, and how the instruction follows from it.
    """

    name: str
    allocation: int
    size: int
    offset: int
    shape: str
    first: int = 0
    last: int = 0
    source: str = ""


@dataclass(frozen=True)
class Buffers:
    """Temporaries of a program, and everything that lies in arguments, outputs and temporaries.

    live: temporaries at the moment when they take most, largest first, one entry per place.
    """

    temporaries: list[Buffer]
    others: list[Buffer]
    live: list[Buffer]

    @property
    def live_bytes(self) -> int:
        return sum(b.size for b in self.live)


def read_dump(folder: Path, compiled_text: str) -> Buffers | None:
    """What the compiler wrote into `folder`; None if that cannot be read."""
    assignment = _only(folder, "*buffer-assignment.txt")
    ranges = _only(folder, "*live-range.txt")
    if assignment is None or ranges is None:
        return None
    return buffers(assignment.read_text(), ranges.read_text(), compiled_text)


def _only(folder: Path, pattern: str) -> Path | None:
    """The largest match: small helper modules are dumped too."""
    found = sorted(folder.rglob(pattern), key=lambda path: path.stat().st_size)
    return found[-1] if found else None


def buffers(assignment: str, ranges: str, compiled_text: str) -> Buffers | None:
    """See `read_dump`; None if there is no temporary or argument in the text."""
    alive, made = _live_ranges(ranges), {i.name: i for i in instructions(compiled_text)}
    temporaries, others = [], []
    for kind, buffer, key in _placed(assignment):
        first, last = alive.get(key, (0, 0))
        known = replace(buffer, first=first, last=last, source=_source(buffer.name, made))
        (temporaries if "preallocated-temp" in kind else others).append(known)
    if not temporaries and not others:
        return None
    return Buffers(temporaries, others, _fullest_moment(temporaries))


def _placed(assignment: str) -> Iterator[tuple[str, Buffer, tuple[str, str]]]:
    """(kind of allocation, buffer, key of its live range) of the main memory."""
    number, kind = -1, ""
    for line in assignment.splitlines():
        if match := _ALLOCATION.match(line):
            number, kind = int(match[1]), match[3]
        elif match := _VALUE.match(line):
            other_memory = "color " in kind and "color 0" not in kind
            if other_memory or match["shape"].startswith("("):  # a tuple is a list of addresses
                continue
            place = (number, int(match["size"]), int(match["offset"]), match["shape"])
            key = (match["name"], match["index"] or "")
            yield kind, Buffer(match["name"], *place), key


def _live_ranges(text: str) -> dict[tuple[str, str], tuple[int, int]]:
    found = (_RANGE.match(line) for line in text.splitlines())
    return {(m["name"], m["index"]): (int(m["first"]), int(m["last"])) for m in found if m}


def _fullest_moment(temporaries: Sequence[Buffer]) -> list[Buffer]:
    """What is alive at the position with most bytes. Values that share a place count once."""
    best: list[Buffer] = []
    most = -1
    for moment in sorted({b.first for b in temporaries}):
        places: dict[tuple[int, int], Buffer] = {}
        for b in temporaries:
            if b.first <= moment <= b.last:
                place = (b.allocation, b.offset)
                if place not in places or places[place].size < b.size:
                    places[place] = b
        total = sum(b.size for b in places.values())
        if total > most:
            most, best = total, list(places.values())
    return sorted(best, key=lambda b: -b.size)


# --- instructions ---


class Instruction(NamedTuple):
    """One line of compiled text: `name = shape operation(operand, ...), ...`."""

    line: str
    name: str
    shape: str
    operation: str
    operand: str | None

    @property
    def op_name(self) -> str:
        """The operation of our sources that its metadata names; empty for none."""
        return self.line.partition('op_name="')[2].partition('"')[0]


def instructions(compiled_text: str) -> list[Instruction]:
    found = map(_INSTRUCTION.match, compiled_text.splitlines())
    return [Instruction(**match.groupdict()) for match in found if match]


def _type_and_dims(shape: str) -> tuple[str, tuple[int, ...]]:
    """ "bf16[4,8]{1,0}" -> ("bf16", (4, 8)), of a tuple's first array; no dimensions for others."""
    kind, bracket, rest = shape.lstrip("(").partition("[")
    if not bracket or not kind.isalnum():
        return shape, ()
    return kind, tuple(int(n) for n in rest.partition("]")[0].split(",") if n)


def _source(name: str, made: Mapping[str, Instruction], depth: int = 8) -> str:
    """Where an instruction comes from: the operation named in its metadata; moves of data without
    one say what they move."""
    instruction = made.get(name)
    if instruction is None:
        return ""
    if instruction.op_name:
        return short_source(instruction.op_name)
    operation, inner = instruction.operation, ""
    if operation in _MOVES and instruction.operand and depth:
        inner = _source(instruction.operand, made, depth - 1)
    if operation in _SILENT and inner:
        return inner
    return f"{operation} of {inner}" if inner else operation


# of loops, not of the model
_STRUCTURE = {"while", "body", "cond", "closed_call", "eval_jaxpr", "shard_map"}


def short_source(op_name: str) -> str:
    """ "jit(f)/while/body/closed_call/head/dot_general" -> "head/dot_general"."""
    parts = [p for p in op_name.split("/") if not p.startswith(("jit(", "branch_"))]
    told = [p for p in parts if p not in _STRUCTURE]
    return "/".join(told) or ("carried through a loop" if "while" in parts else op_name)


# --- arrays that should exist once ---


@dataclass(frozen=True)
class Carried:
    """An array that is updated in place, if all is well.

    name: for people. shape: on one device. dtype: the only type in which a copy of it counts; None:
      any type, as for the pool, which a compiler may convert as a whole.
    flat: whether other values of this shape and type are usual (numbers for every slot), so that
      only instructions that move it count, not every temporary of its shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    flat: bool = False

    def is_seen_as(self, kind: str, dims: tuple[int, ...]) -> bool:
        """Whether a value of this type and shape is the array, perhaps with some of its axes
        merged, except for the last."""
        return dims in _views(self.shape) and (not self.dtype or kind == _hlo_type(self.dtype))


def second_copies(text: str, found: Buffers | None, arrays: Sequence[Carried]) -> dict[str, list]:
    """{name: lines of text} for the arrays that exist more than once, for the reader of a report.

    text: of the compiled program. found: its buffers, None if unknown.
    """
    copies = {a.name: copies_of(text, a) for a in arrays}
    for a in arrays if found is not None else ():
        copies[a.name] += [f"{b.name}: {b.shape} ({b.source})" for b in second_buffers(found, a)]
    return {name: lines for name, lines in copies.items() if lines}


def copies_of(text: str, array: Carried) -> list[str]:
    """Instructions of the compiled text that copy, transpose or convert an array of this shape
    within the main memory. A TPU may fetch what is small enough into its VMEM, layout `S(1)`: that
    is no second array."""
    moved = (i for i in instructions(text) if i.operation in _NEW_ARRAYS and "S(1)" not in i.shape)
    return [i.line[:160] for i in moved if array.is_seen_as(*_type_and_dims(i.shape))]


def second_buffers(found: Buffers, array: Carried) -> list[Buffer]:
    """Temporaries of the array's shape; none for a `flat` array."""
    if array.flat:
        return []
    return [b for b in found.temporaries if array.is_seen_as(*_type_and_dims(b.shape))]


def _hlo_type(dtype: str) -> str:
    """ "float32" -> "f32", "int8" -> "s8", "bool" -> "pred"."""
    kind = dtype.rstrip("0123456789")
    letters = {"float": "f", "int": "s", "uint": "u", "bfloat": "bf", "bool": "pred"}
    return letters.get(kind, kind) + dtype.removeprefix(kind)


def _views(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The shape, and those with neighbouring axes merged; the last axis stays."""
    if len(shape) <= 2:
        return [tuple(shape)]
    first, second, *rest = shape
    return [*((first, *view) for view in _views((second, *rest))), *_views((first * second, *rest))]
