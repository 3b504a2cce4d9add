"""What the devices of a mesh exchange while a program runs, read from its compiled text: every
collective operation with its bytes, as often as its loops run it.

Bytes are those of the whole array on one device: what an all-gather or an all-reduce leaves there,
what a reduce-scatter begins with. What a device sends follows from them and from how many devices
exchange (`sent`), if it goes around a ring.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.aot.buffers import short_source
from experiments.aot.hlo import Instruction, Module, arrays

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


@dataclass(frozen=True)
class Collective:
    """Exchanges of one kind by one operation of our sources.

    group: how many devices exchange with each other.
    bytes: of one exchange, on one device.
    """

    kind: str
    source: str
    group: int
    bytes: float

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one exchange."""
        return sent_by(self.kind, self.group, self.bytes)


def sent_by(kind: str, group: int, size: float) -> float:
    """Bytes that a device sends around a ring of `group` devices. size: of the whole array."""
    others = (group - 1) / group
    if kind == "all-reduce":  # a reduce-scatter, then an all-gather
        return 2 * others * size
    return size if kind.startswith("collective-") and group > 1 else others * size


def read(text: str) -> Counter[Collective]:
    """{exchange: how often it runs} of `jax.stages.Compiled.as_text()`. Of several branches all
    count; a loop of unknown length counts once. `ValueError` if it is no such text."""
    module = Module.parse(text)
    found: Counter[Collective] = Counter()
    for instruction, times in _instructions(module, module.entry, 1.0):
        if (made := _collective(instruction, module)) is not None:
            found[made] += times
    return found


def _instructions(module: Module, name: str, times: float) -> Iterator[tuple[Instruction, float]]:
    """All instructions that a computation runs, with how often."""
    for i in module[name]:
        yield i, times
        rounds = (module.trips(i) or 1) if i.opcode == "while" else 1
        if i.opcode.removesuffix("-start") in KINDS:  # what it calls adds two numbers
            continue
        keys = ("body", "calls", "branch_computations", "true_computation", "false_computation")
        keys += ("to_apply",) if i.opcode == "call" else ()
        for inner in i.called(*keys):
            if inner in module.computations:
                yield from _instructions(module, inner, times * rounds)


def _collective(i: Instruction, module: Module) -> Collective | None:
    kind = i.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    sizes, count = [a.bytes for a in arrays(i.shape)], len(i.operands)
    if i.opcode.endswith("-start") and kind != "all-reduce":  # operands, then results
        sizes = sizes[count : 2 * count]
    group = _group(i.attributes)
    size = sum(sizes) * (group if kind == "reduce-scatter" else 1)
    source = short_source(i.attribute(r'op_name="([^"]*)"') or "") or i.name
    return Collective(kind, source, group, size)


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


# --- reports ---


def describe(found: Mapping[Collective, float]) -> list[dict]:
    """Exchanges with most bytes first, for a JSON file. bytes and sent: of all their runs."""
    rows = [
        {
            "kind": c.kind,
            "source": c.source,
            "group": c.group,
            "calls": calls,
            "bytes": calls * c.bytes,
            "sent_bytes": calls * c.sent,
        }
        for c, calls in _by_source(found).items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def _by_source(found: Mapping[Collective, float]) -> dict[Collective, float]:
    """One entry for all arrays of one operation, with their mean bytes."""
    total, calls = Counter(), Counter()
    for c, times in found.items():
        key = replace(c, bytes=0.0)
        total[key] += times * c.bytes
        calls[key] += times
    return {replace(c, bytes=total[c] / n): n for c, n in calls.items()}


def by_kind(rows: Sequence[Mapping]) -> dict[str, dict]:
    """{kind: {"calls", "bytes", "sent_bytes"}} of `describe`."""
    found: dict[str, Counter] = {}
    for row in rows:
        sums = {name: row[name] for name in ("calls", "bytes", "sent_bytes")}
        found.setdefault(row["kind"], Counter()).update(sums)
    return {kind: dict(sums) for kind, sums in found.items()}
