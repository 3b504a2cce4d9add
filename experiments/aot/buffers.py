"""Temporaries of a compiled program by name, and arrays that exist twice.

The compilers for GPU and TPU dump their buffer assignment as text. It and the compiled text tell

- which temporaries are largest, and which operation in our sources made them (the scopes are those
  of `varjax.core.scales`);
- whether the KV pool and the other large arrays of the cache exist once. A second one shows as a
  copy or as a temporary of the same shape.

Only the device's main memory counts; a TPU's VMEM is another space.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.aot.hlo import Instruction, Module

_ALLOCATION = re.compile(r"^allocation (\d+): size \d+, (.*):$")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>\S+?)(?:\{[\d,]*\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>[^(].*)$"  # of no tuple
)
_SHAPE = re.compile(r"\(*(\w+)\[([\d,]*)\]")
_MOVES = {"copy", "copy-start", "copy-done", "transpose", "bitcast", "reshape", "convert"}
_NEW_ARRAYS = {"copy", "copy-start", "transpose", "convert"}  # moves that write a second array
_SILENT = {"bitcast", "copy-done"}  # these add nothing to what their operand says
_STRUCTURE = {"while", "body", "cond", "closed_call", "eval_jaxpr", "shard_map"}  # of loops


@dataclass(frozen=True)
class Buffer:
    """A temporary of the program.

    name: the instruction's.
    place: number of the allocation, and bytes from its start.
    shape: as XLA writes it.
    source: the operation of our sources, and how the instruction follows from it.
    """

    name: str
    place: tuple[int, int]
    size: int
    shape: str
    source: str


def read_dump(folder: Path, module: Module) -> list[Buffer]:
    """The temporaries that the compiler dumped into `folder`; empty if the dump cannot be read."""
    # the program's, among those of small helper modules
    paths = folder.rglob("*buffer-assignment.txt")
    path = max(paths, key=lambda p: p.stat().st_size, default=None)
    return temporaries(path.read_text(), module) if path else []


def temporaries(assignment: str, module: Module) -> list[Buffer]:
    """The temporaries in the text of the buffer assignment, the largest first."""
    made = {i.name: i for i in module}
    found, number, counts = [], -1, False
    for line in assignment.splitlines():
        if match := _ALLOCATION.match(line):
            number, kind = int(match[1]), match[2]
            other_memory = "color " in kind and "color 0" not in kind
            counts = "preallocated-temp" in kind and not other_memory
        elif counts and (match := _VALUE.match(line)):
            name, place = match["name"], (number, int(match["offset"]))
            found.append(
                Buffer(name, place, int(match["size"]), match["shape"], _source(name, made))
            )
    return sorted(found, key=lambda b: -b.size)


def largest(buffers: Sequence[Buffer], most: int) -> list[Buffer]:
    """The largest temporaries; of several that share a place the first."""
    places: dict[tuple[int, int], Buffer] = {}
    for b in buffers:
        places.setdefault(b.place, b)
    return list(places.values())[:most]


def _source(name: str, made: Mapping[str, Instruction]) -> str:
    """The operation that an instruction comes from, as its metadata names it. Moves of data without
    metadata say what they move."""
    instruction = made.get(name)
    if instruction is None:
        return ""
    if instruction.op_name:
        return short_source(instruction.op_name)
    moves = instruction.opcode in _MOVES and instruction.operands
    inner = _source(instruction.operands[0], made) if moves else ""
    if instruction.opcode in _SILENT and inner:
        return inner
    return f"{instruction.opcode} of {inner}" if inner else instruction.opcode


def short_source(op_name: str) -> str:
    """ "jit(f)/while/body/closed_call/head/dot_general" -> "head/dot_general"."""
    parts = [p for p in op_name.split("/") if not p.startswith(("jit(", "branch_"))]
    told = [p for p in parts if p not in _STRUCTURE]
    return "/".join(told) or ("carried through a loop" if "while" in parts else op_name)


# --- arrays that should exist once ---


@dataclass(frozen=True)
class Carried:
    """An array that is updated in place, if all is well.

    name: for people.
    shape: on one device.
    dtype: the only type in which a copy counts; None: any type, as for the pool, which a compiler
      may convert as a whole.
    flat: whether other values of this shape and type are usual (numbers for every slot). Then only
      instructions that move it count, not every temporary of its shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    flat: bool = False

    def is_seen_as(self, shape: str) -> bool:
        """Whether a value of this shape may be the array, perhaps with axes merged (the last axis
        apart). shape: as XLA writes it ("bf16[4,8]{1,0}"); of a tuple the first one counts."""
        if not (match := _SHAPE.match(shape)):
            return False
        dims = tuple(int(n) for n in match[2].split(",") if n)
        if self.dtype is None:
            return dims in _views(self.shape)
        kind = self.dtype.rstrip("0123456789")  # "float32" is "f32", "int8" is "s8"
        letters = {"float": "f", "int": "s", "uint": "u", "bfloat": "bf", "bool": "pred"}
        dtype = letters.get(kind, kind) + self.dtype.removeprefix(kind)
        return dims in _views(self.shape) and match[1] == dtype


def second_copies(
    module: Module, buffers: Sequence[Buffer], arrays: Sequence[Carried]
) -> dict[str, list[str]]:
    """{name: lines for the reader of a report} of the arrays that exist more than once. The lines
    are instructions that copy, transpose or convert the array within the main memory, and
    temporaries of its shape. Arrays in a TPU's VMEM (layout `S(1)`) do not count.

    buffers: the program's temporaries.
    """
    moves = [i for i in module if i.opcode in _NEW_ARRAYS and "S(1)" not in i.shape]
    found = {}
    for array in arrays:
        lines = [str(i)[:160] for i in moves if array.is_seen_as(i.shape)]
        placed = [] if array.flat else [b for b in buffers if array.is_seen_as(b.shape)]
        found[array.name] = lines + [f"{b.name}: {b.shape} ({b.source})" for b in placed]
    return {name: lines for name, lines in found.items() if lines}


def _views(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The shape, and those with neighbouring axes merged; the last axis stays."""
    if len(shape) <= 2:
        return [tuple(shape)]
    first, second, *rest = shape
    return [*((first, *view) for view in _views((second, *rest))), *_views((first * second, *rest))]
