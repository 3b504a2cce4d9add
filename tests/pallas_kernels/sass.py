"""Machine instructions of a compiled kernel's loops, counted in the text of `nvdisasm -c`.

A loop is what lies between a label and the last jump back to it. A warp's way through it is counted
along the fewest instructions that lead around: branches are taken where that is shorter, as they
are around the mask of a step whose keys are all valid, and waits find what they wait for. What a
predicate switches off counts, because it takes its turn as well.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jaxlib

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@cache
def tool(name: str) -> str | None:
    """A program of CUDA's toolkit: on the path, of a package (nvidia-cuda-nvdisasm,
    nvidia-cuda-nvcc), or where the toolkit is installed."""
    packages = Path(jaxlib.__file__).parents[1] / "nvidia"
    toolkit = Path(os.environ.get("CUDA_ROOT", "/usr/local/cuda")) / "bin" / name
    found = [*sorted(packages.glob(f"*/bin/{name}")), *([toolkit] if toolkit.exists() else [])]
    return shutil.which(name) or (str(found[0]) if found else None)


def available() -> bool:
    """Whether PTX can be assembled and disassembled here."""
    return bool(tool("ptxas") and tool("nvdisasm"))


def assembled(ptx: Path) -> str:
    """The instructions of PTX text, for the architecture that it names."""
    architecture = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)[1]
    cubin = ptx.with_suffix(".cubin")
    subprocess.run([tool("ptxas"), f"-arch={architecture}", ptx, "-o", cubin], check=True)
    command = [tool("nvdisasm"), "-c", cubin]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Instruction:
    """predicate: "" where there is none. target: the label that it jumps to, or None."""

    predicate: str
    name: str
    target: str | None


@dataclass(frozen=True)
class Loop:
    """names: of the instructions along the shortest way around, in the order of the text."""

    label: str
    names: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many instructions of every name, without what follows its first point."""
        return dict(Counter(name.split(".")[0] for name in self.names))


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """(instructions, the number of the instruction after every label)."""
    found, labels = [], {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := INSTRUCTION.match(line):
            predicate, name, rest = match.groups()
            target = TARGET.search(rest)
            jumps = target[1] if target and name.startswith("BRA") else None
            found.append(Instruction(predicate or "", name, jumps))
    return found, labels


def loops(text: str) -> list[Loop]:
    """All loops, in the order of the text."""
    found, labels = parse(text)
    ends = {}
    for number, instruction in enumerate(found):
        begin = labels.get(instruction.target)
        if begin is not None and begin <= number:
            ends[instruction.target] = number
    order = sorted(ends, key=lambda label: labels[label])
    ways = [(label, _shortest(found, labels, labels[label], ends[label])) for label in order]
    # waits that found nothing go on at the end of the text, and jump back where there is no loop
    return [Loop(label, names) for label, names in ways if names]


def _shortest(found, labels, begin: int, end: int) -> tuple[str, ...]:
    """Names of the fewest instructions from `begin` to the jump back at `end`."""
    # ways to every instruction, from the end backwards: jumps within the loop lead forward, except
    # those of loops inside, which are passed through
    best: dict[int, tuple[int, int | None]] = {end: (1, None)}
    for number in range(end - 1, begin - 1, -1):
        this, following = found[number], []
        falls = this.predicate or not this.name.startswith(("BRA", "EXIT", "RET"))
        if falls and number + 1 in best:
            following.append(number + 1)
        jump = labels.get(this.target)
        if jump is not None and number < jump <= end and jump in best:
            following.append(jump)
        if following:
            chosen = min(following, key=lambda n: best[n][0])
            best[number] = (best[chosen][0] + 1, chosen)
    names, number = [], begin if begin in best else None
    while number is not None:
        names.append(found[number].name)
        number = best[number][1]
    return tuple(names)
