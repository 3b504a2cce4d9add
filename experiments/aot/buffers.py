"""Buffers of a compiled program by name: what the compiler placed where, and when it lives.

XLA writes its buffer assignment and live ranges as text when asked to dump (`DUMP_OPTIONS`); both
the GPU and the TPU compiler do. From these two and the compiled text follow

- the temporaries that are alive when temporaries take most memory, with the operation in our
  sources that made them (the scopes prepare, embed, project, attend, finish, head, choose,
  accumulate, store are those of `varjax.engine`);
- whether the KV pool and the other large arrays of the cache exist once: copies of them, and
  buffers of their shape outside the donated argument.

Only the device's main memory counts; a TPU's VMEM is another space.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DUMP_OPTIONS = {"xla_dump_hlo_as_text": True}
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*):$")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>\S+?)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$"
)
_RANGE = re.compile(r"^    (?P<name>\S+?)\{(?P<index>[\d,]*)\}:(?P<first>\d+)-(?P<last>\d+)$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"^(\w+)\[([\d,]*)\]")
_MOVES = {"copy", "copy-start", "copy-done", "transpose", "bitcast", "reshape", "convert"}
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

    @property
    def type_and_dims(self) -> tuple[str, tuple[int, ...]]:
        """("bf16", (4, 8)); no dimensions for tuples."""
        match = _ARRAY.match(self.shape)
        if not match:
            return self.shape, ()
        return match[1], tuple(int(n) for n in match[2].split(",") if n)


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
    alive, sources = _live_ranges(ranges), _sources(compiled_text)
    temporaries, others = [], []
    for kind, buffer, key in _placed(assignment):
        first, last = alive.get(key, (0, 0))
        known = Buffer(
            *(buffer.name, buffer.allocation, buffer.size, buffer.offset, buffer.shape),
            *(first, last, sources.get(buffer.name, "")),
        )
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
            if re.search(r"\bcolor [1-9]", kind) or match["shape"].startswith("("):
                continue  # another memory space; a tuple is a list of addresses
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


# --- names ---


def _sources(compiled_text: str) -> dict[str, str]:
    """{instruction: where it comes from}: the operation named in its metadata; moves of data
    without one say what they move."""
    made = {m[1]: m[2] for m in map(_INSTRUCTION.match, compiled_text.splitlines()) if m}
    return {name: _source(name, made) for name in made}


def _source(name: str, made: dict[str, str], depth: int = 8) -> str:
    rest = made.get(name, "")
    named = re.search(r'op_name="([^"]*)"', rest)
    if named:
        return short_source(named[1])
    call = re.search(r"(?:^|\s)([a-z][\w\-]*)\((?:%?([\w.\-]+))?", rest)
    if call is None:
        return ""
    operation, operand = call.groups()
    inner = _source(operand, made, depth - 1) if operation in _MOVES and operand and depth else ""
    if operation in _SILENT and inner:
        return inner
    return f"{operation} of {inner}" if inner else operation


_STRUCTURE = {
    "while",
    "body",
    "cond",
    "closed_call",
    "eval_jaxpr",
    "shard_map",
}  # of loops, not of the model


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
    within the main memory: `name = shape operation(...)`.

    The array may be seen with some of its axes merged, except for the last. A TPU may fetch what is
    small enough into its VMEM, layout `S(1)`: that is no second array.
    """
    types = r"\w+" if array.dtype is None else _hlo_type(array.dtype)
    dims = "|".join(",".join(map(str, d)) for d in _views(array.shape))
    moved = re.compile(
        rf"= \(?{types}\[(?:{dims})\]\S*(?: [^=]*?)? (?:copy|copy-start|transpose|convert)\("
    )
    lines = (line.strip().removeprefix("ROOT ") for line in text.splitlines() if moved.search(line))
    return [line[:160] for line in lines if "S(1)" not in line.split("(%", 1)[0]]


def second_buffers(found: Buffers, array: Carried) -> list[Buffer]:
    """Temporaries of the array's shape; none for a `flat` array."""
    if array.flat:
        return []
    views, kind = set(_views(array.shape)), array.dtype and _hlo_type(array.dtype)
    seen = ((b, *b.type_and_dims) for b in found.temporaries)
    return [b for b, its_type, dims in seen if dims in views and kind in (None, its_type)]


def _hlo_type(dtype: str) -> str:
    """ "float32" -> "f32", "int8" -> "s8", "bool" -> "pred"."""
    kind, bits = re.fullmatch(r"([a-z]+)(\w*)", dtype).groups()
    letters = {"float": "f", "int": "s", "uint": "u", "bfloat": "bf", "bool": "pred"}
    return letters.get(kind, kind) + bits


def _views(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The shape, and those with neighbouring axes merged; the last axis stays."""
    if len(shape) <= 2:
        return [tuple(shape)]
    first, second, *rest = shape
    return [*((first, *view) for view in _views((second, *rest))), *_views((first * second, *rest))]
