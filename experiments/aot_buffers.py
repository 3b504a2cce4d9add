"""Buffers of a compiled program by name: what the compiler placed where, and when it lives.

XLA writes its buffer assignment and live ranges as text when asked to dump (`DUMP_OPTIONS`); both
the GPU and the TPU compiler do. From these two and the compiled text follow

- the temporaries that are alive when temporaries take most memory, with the operation in our
  sources that made them (the scopes prepare, embed, project, attend, finish, head, choose,
  accumulate, store are those of `varjax.engine`);
- whether the KV pool exists once: buffers of its shape outside the donated argument.

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


# --- the pool ---


def pool_copies(text: str, shape: Sequence[int]) -> list[str]:
    """Instructions of the compiled text that copy, transpose or convert an array of the pool's
    shape, in any type, within the main memory: `name = shape operation(...)`.

    The pool may be seen as [R, blocks, size, 2 H] or with some of the first three axes merged. A
    TPU may fetch a pool that is small enough into its VMEM, layout `S(1)`: that is no second pool.
    """
    dims = "|".join(",".join(map(str, d)) for d in _views(shape))
    moved = re.compile(
        rf"= \(?\w+\[(?:{dims})\]\S*(?: [^=]*?)? (?:copy|copy-start|transpose|convert)\("
    )
    lines = (line.strip().removeprefix("ROOT ") for line in text.splitlines() if moved.search(line))
    return [line[:160] for line in lines if "S(1)" not in line.split("(%", 1)[0]]


def second_pools(found: Buffers, shape: Sequence[int]) -> list[Buffer]:
    """Temporaries of the pool's shape, in any type."""
    views = set(_views(shape))
    return [b for b in found.temporaries if b.type_and_dims[1] in views]


def _views(shape: Sequence[int]) -> list[tuple[int, ...]]:
    rows, blocks, size, width = shape
    return [
        (rows, blocks, size, width),
        (rows, blocks * size, width),
        (rows * blocks, size, width),
        (rows * blocks * size, width),
    ]
