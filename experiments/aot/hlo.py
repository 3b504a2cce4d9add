"""Compiled programs as text: computations, their instructions, and the bytes of shapes."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_TYPES = {"pred": 1, "token": 0, "c64": 8, "c128": 16, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25}
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_BRANCHES = ("true_computation", "false_computation", "branch_computations")


def array_bytes(shape: str) -> list[float]:
    """Bytes of each array of a shape, which may be a tuple; `ValueError` if a type is unknown."""
    found = []
    for kind, dims in _ARRAY.findall(shape):
        bits = re.match(r"(?:bf|f|s|u)(\d+)", kind)  # "f32", "f8e4m3fn"
        if kind not in _TYPES and not bits:
            raise ValueError(f"unknown type {kind!r}")
        size = _TYPES[kind] if kind in _TYPES else int(bits[1]) / 8
        found.append(math.prod(int(d) for d in dims.split(",") if d) * size)
    return found


@dataclass(frozen=True)
class Instruction:
    """One line of the text. rest: behind the opening bracket: operands, then attributes."""

    name: str
    shape: str
    opcode: str
    rest: str

    def __str__(self) -> str:
        return f"%{self.name} = {self.shape} {self.opcode}({self.rest}"

    @cached_property
    def literal(self) -> str:
        """The text in the brackets, which is a constant's value."""
        depth = 1
        for i, character in enumerate(self.rest):
            depth += (character in "({[") - (character in ")}]")
            if not depth:
                return self.rest[:i]
        return self.rest

    @property
    def operands(self) -> list[str]:
        parts = (part.strip() for part in self.literal.split(","))
        named = re.findall(r"%([\w.\-]+)", self.literal)
        return named or [part.split(" ")[-1] for part in parts if part]

    @property
    def attributes(self) -> str:
        return self.rest[len(self.literal) :]

    def attribute(self, pattern: str) -> str:
        """The first group of a regular expression in the attributes; empty if it is not there."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """The path of scopes and the operation in our sources; empty if none is said."""
        return self.attribute(r'op_name="([^"]*)"')

    def called(self, *keys: str) -> list[str]:
        """Names of computations that these attributes name ("body", "calls", ...)."""
        found = []
        for key in keys:
            pattern = rf"\b{key}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})"
            for one, several in re.findall(pattern, self.attributes):
                found += [one] if one else re.findall(r"%?([\w.\-]+)", several)
        return found

    @property
    def bytes(self) -> float:
        """Bytes of the result."""
        return sum(array_bytes(self.shape))


@dataclass(frozen=True)
class Module:
    """Instructions of each computation. entry: the name of the one that runs."""

    computations: dict[str, list[Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Read `jax.stages.Compiled.as_text()`. `ValueError` without an entry computation."""
        computations: dict[str, list[Instruction]] = {}
        inside: list[Instruction] = []
        entry = None
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                inside.append(Instruction(**match.groupdict()))
            elif head := _HEAD.match(line):
                inside = computations[head["name"]] = []
                entry = head["name"] if head["entry"] else entry
        if entry is None:
            raise ValueError("a compiled program has an ENTRY computation, this text has none")
        return cls(computations, entry)

    def __iter__(self) -> Iterator[Instruction]:
        """All instructions, each once."""
        for instructions in self.computations.values():
            yield from instructions

    def runs(
        self, name: str | None = None, times: float = 1.0, *, everything: bool = False
    ) -> Iterator[tuple[Instruction, float]]:
        """(instruction, how often it runs) of a computation and of what it calls, in order. A loop
        of unknown length counts once.

        Args:
          name: the computation; None: the whole program.
          times: how often it runs.
          everything: also what is within fusions, and all branches; else that of most operations.
        """
        for i in self.computations[name or self.entry]:
            yield i, times
            rounds, called = 1, []
            if i.opcode == "while":
                rounds, called = self.trips(i) or 1, i.called("body")
            elif i.opcode == "conditional":
                called = i.called(*_BRANCHES)
                length = lambda name: sum(1 for _ in self.runs(name))  # noqa: E731
                called = called if everything else [max(called, key=length)]
            elif i.opcode == "call":
                called = i.called("to_apply", "calls")
            elif everything or i.opcode.endswith("-start"):
                called = i.called("calls")
            for inner in called:
                yield from self.runs(inner, times * rounds, everything=everything)

    def trips(self, loop: Instruction) -> int | None:
        """Trip count of a while loop, from the compiler or from the bound of its condition; None
        where neither is there."""
        if known := loop.attribute(r'known_trip_count":\s*\{\s*"n":\s*"(\d+)"'):
            return int(known)
        bounds = (i for c in loop.called("condition") for i, _ in self.runs(c, everything=True))
        # whole numbers in a condition "counter < constant", which may be within a fusion
        texts = [i.literal.strip() for i in bounds if i.opcode == "constant"]
        return max((int(text) for text in texts if re.fullmatch(r"\d+", text)), default=None)
