"""The exchanges of a mesh's devices while a program runs, read from its compiled text: every
collective operation with its bytes, as often as its loops run it.

Bytes are those of the whole array on one device: what an all-gather or an all-reduce leaves there,
what a reduce-scatter begins with. What a device sends follows from them and from how many devices
exchange, if it goes around a ring.
"""

import math
import re
from collections import Counter

from experiments.aot.buffers import short_source
from experiments.aot.hlo import Instruction, Module, array_bytes

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_USED = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")  # an axis, or so much of it
_PAIRS = re.compile(r"source_target_pairs=\{\{")


def read(module: Module) -> list[dict]:
    """Exchanges of one kind by one operation of our sources, most bytes first, for a JSON file. Of
    several branches all count; a loop of unknown length counts once.

    Keys: kind, source, group (how many devices exchange with each other), calls, bytes and
    sent_bytes (around a ring) of all calls.
    """
    calls, moved = Counter(), Counter()
    for i, times in module.runs(everything=True):
        kind = i.opcode.removesuffix("-start")
        if kind in KINDS:
            key = kind, short_source(i.op_name) or i.name, _group(i.attributes)
            calls[key] += times
            moved[key] += times * _bytes(i, kind, key[2])
    return [
        {
            "kind": kind,
            "source": source,
            "group": group,
            "calls": calls[kind, source, group],
            "bytes": size,
            "sent_bytes": size * _sent(kind, group),
        }
        for (kind, source, group), size in moved.most_common()
    ]


def _bytes(i: Instruction, kind: str, group: int) -> float:
    """Bytes of the whole array in one exchange."""
    sizes, count = array_bytes(i.shape), len(i.operands)
    if i.opcode.endswith("-start") and kind != "all-reduce":  # operands, then results
        sizes = sizes[count : 2 * count]
    return sum(sizes) * (group if kind == "reduce-scatter" else 1)


def _sent(kind: str, group: int) -> float:
    """Share of the array that a device sends around a ring."""
    if kind.startswith("collective-") and group > 1:
        return 1.0
    # an all-reduce is a reduce-scatter, then an all-gather
    return (1 + (kind == "all-reduce")) * (group - 1) / group


def _group(attributes: str) -> int:
    """How many devices exchange with each other; 2 where pairs do."""
    if listed := _LISTED.search(attributes):
        return len(listed[1].split(","))
    if counted := _COUNTED.search(attributes):
        return int(counted[2])
    if named := _MESH.search(attributes):
        sizes = dict(_AXIS.findall(named[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in _USED.findall(named[2]))
    return 2 if _PAIRS.search(attributes) else 1
