"""Compiled programs as text: computations, their instructions, and the bytes of shapes."""

import math
import re
from dataclasses import dataclass
from functools import cached_property

_TYPES = {"pred": 1, "token": 0, "c64": 8, "c128": 16, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25}
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) "
    r"(?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)


@dataclass(frozen=True)
class Array:
    """A shape and an element type as the compiler writes them ("bf16")."""

    kind: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return self.size * type_bytes(self.kind)


def type_bytes(kind: str) -> float:
    """Bytes of an element: "f32" takes 4, "f8e4m3fn" 1.

    Raises:
      ValueError: the type is not known.
    """
    if kind in _TYPES:
        return _TYPES[kind]
    if not (bits := re.match(r"(?:bf|f|s|u)(\d+)", kind)):
        raise ValueError(f"unknown type {kind!r}")
    return int(bits[1]) / 8


def arrays(shape: str) -> list[Array]:
    """All arrays of a shape, which may be a tuple."""
    return [
        Array(kind, tuple(int(d) for d in dims.split(",") if d))
        for kind, dims in _ARRAY.findall(shape)
    ]


def shape_bytes(shape: str) -> float:
    return sum(a.bytes for a in arrays(shape))


@dataclass(frozen=True)
class Instruction:
    """One line of the text. rest: the text behind the opening bracket: operands, then
    attributes."""

    name: str
    shape: str
    opcode: str
    rest: str
    root: bool

    @cached_property
    def _end(self) -> int:
        """The place in `rest` where the operands end."""
        depth = 1
        for i, character in enumerate(self.rest):
            depth += (character in "({[") - (character in ")}]")
            if not depth:
                return i
        return len(self.rest)

    @cached_property
    def operands(self) -> list[str]:
        """Names, in order."""
        inside = self.rest[: self._end]
        named = re.findall(r"%([\w.\-]+)", inside)
        return named or [part.strip().split(" ")[-1] for part in inside.split(",") if part.strip()]

    @property
    def attributes(self) -> str:
        return self.rest[self._end :]

    @property
    def literal(self) -> str:
        """The text in the brackets: a parameter's number, a constant's value."""
        return self.rest[: self._end]

    def called(self, *keys: str) -> list[str]:
        """Names of computations that these attributes name ("body", "calls", ...)."""
        found = []
        for key in keys:
            for one, several in re.findall(
                rf"\b{key}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})", self.attributes
            ):
                found += [one] if one else re.findall(r"%?([\w.\-]+)", several)
        return found

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        found = re.search(pattern, self.attributes)
        return found and found[1]

    @property
    def bytes(self) -> float:
        """Bytes of the result."""
        return shape_bytes(self.shape)


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction]

    def __iter__(self):
        return iter(self.instructions.values())

    def get(self, name: str) -> Instruction | None:
        return self.instructions.get(name)

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self if i.root), list(self)[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self if i.opcode == "parameter"}

    def users(self, name: str) -> list[Instruction]:
        return [i for i in self if name in i.operands]


@dataclass(frozen=True)
class Module:
    """Computations by name. entry: the name of the one that runs."""

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Read `jax.stages.Compiled.as_text()`.

        Raises:
          ValueError: there is no entry computation in it.
        """
        computations: dict[str, Computation] = {}
        current, entry = None, None
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = Computation(head["name"], {})
                computations[current.name] = current
                entry = current.name if head["entry"] else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (match := _INSTRUCTION.match(line)):
                current.instructions[match["name"]] = Instruction(
                    name=match["name"],
                    shape=match["shape"],
                    opcode=match["opcode"],
                    rest=match["rest"],
                    root=bool(match["root"]),
                )
        if entry is None:
            raise ValueError(
                "the text of a compiled program has an ENTRY computation, this has not"
            )
        return cls(computations, entry)

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]

    def trips(self, loop: Instruction) -> int | None:
        """How often a while loop runs, as the compiler says or as the bound of its condition says;
        None where neither is there."""
        if known := loop.attribute(r'known_trip_count":\s*\{\s*"n":\s*"(\d+)"'):
            return int(known)
        [condition] = loop.called("condition") or [None]
        return self._bound(condition) if condition in self.computations else None

    def all_trips(self, name: str) -> list[int | None]:
        """`trips` of all loops that a computation runs, in order, each before those inside it."""
        found, keys = [], ("true_computation", "false_computation", "branch_computations", "body")
        for i in self[name]:
            if i.opcode == "while":
                found.append(self.trips(i))
            inner = keys if i.opcode in ("while", "conditional") else ()
            inner = ("to_apply", "calls") if i.opcode == "call" else inner
            for called in i.called(*inner):
                found += self.all_trips(called)
        return found

    def _bound(self, name: str) -> int | None:
        """The constant of a condition "counter < constant", which may be within a fusion."""
        here, found = self[name], []
        for i in here:
            if i.opcode == "constant" and re.fullmatch(r"\d+", i.literal.strip()):
                found.append(int(i.literal))
            for inner in i.called("calls"):
                found += filter(None, [self._bound(inner)])
        return max(found, default=None)
