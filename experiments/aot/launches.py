"""Starts of a program's kernels on a GPU, read from the list of the host's steps.

XLA records runs of kernels as command buffers (CUDA graphs), which start all of them at once. What
may be recorded depends on the versions of driver and toolkit, which the description of an absent
chip names (`pallas_kernels.chips`). The compiler writes the list ("thunks") when it dumps.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+)")
_PART = re.compile(r"^ *(condition|body|branch\w*):", re.MULTILINE)
_NO_START = ("kSequential", "kWaitForStreams", "kPartitionId", "kReplicaId")


class Launches(NamedTuple):
    """Starts by the host while a program runs.

    buffers: command buffers. inside: kernels, library calls and copies that these start. outside:
    those that the host starts one by one.
    """

    buffers: float = 0.0
    inside: float = 0.0
    outside: float = 0.0


@dataclass
class _Node:
    """A line of the list. part: of its parent that it belongs to, "condition" for example. rounds:
    of a loop."""

    kind: str
    indent: int
    part: str = ""
    rounds: int | None = None
    children: list["_Node"] = field(default_factory=list)


def read_dump(folder: Path, trips: Sequence[int | None]) -> Launches | None:
    """The starts of the program that was dumped into `folder`; None if that cannot be read. trips:
    rounds of its loops (`Module.all_trips`)."""
    # the program's, among those of small helper modules
    lists = folder.rglob("*thunk_sequence.txt")
    path = max(lists, key=lambda p: p.stat().st_size, default=None)
    if path is None:
        return None
    recorded = path.with_name(f"{path.stem}_after_thunk_passes.txt")
    # without it nothing was recorded
    return read_launches((recorded if recorded.exists() else path).read_text(), trips)


def read_launches(text: str, trips: Sequence[int | None]) -> Launches | None:
    """The starts that a text lists, loops counted by their rounds; None if it lists other loops
    than `trips` has. A loop of unknown length counts once, of branches the one that starts most."""
    root = _Node("", -1)
    above, part, loops = [root], "", []
    for line in text.splitlines():
        if found := _PART.match(line):
            part = found[1]
        elif found := _LINE.match(line):
            node = _Node(found["kind"], len(found["indent"]), part)
            loops += [node] * (node.kind == "kWhile")
            while above[-1].indent >= node.indent:
                above.pop()
            above[-1].children.append(node)
            above.append(node)
    if len(loops) != len(trips):
        return None
    for loop, rounds in zip(loops, trips, strict=True):
        loop.rounds = rounds
    return _all(root.children)


def _all(nodes: Sequence[_Node], times: float = 1.0) -> Launches:
    each = map(_one, nodes)
    return Launches(*(times * sum(counts) for counts in zip(*each, strict=True)))


def _one(node: _Node) -> Launches:
    parts: dict[str, list[_Node]] = {}
    for child in node.children:
        parts.setdefault(child.part, []).append(child)
    if node.kind == "kWhile":
        # where the host knows how often a loop runs it does not ask
        asked = [n for name, part in parts.items() for n in part if name != "condition"]
        return _all(asked, node.rounds) if node.rounds else _all(node.children)
    if node.kind == "kConditional":
        each = map(_all, parts.values())
        return max(each, key=lambda e: e.inside + e.outside, default=Launches())
    if node.children:
        found = _all(node.children)
        recorded = node.kind == "kCommandBuffer"
        return Launches(1.0, found.inside + found.outside) if recorded else found
    starts = not (node.kind in _NO_START or node.kind.endswith("Done"))
    return Launches(outside=float(starts))
