"""The kernels that a compiled program starts, the weights that it copies, and the exchanges of a
mesh's devices, read from its text.

Outside fusions every operation that computes or moves numbers is a kernel, as often as its loops
run. What is inside a kernel of ours no text says.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

from experiments.aot.buffers import short_source
from experiments.aot.hlo import Instruction, Module, array_bytes
from varjax.generation.cost import Cost

LISTED = 8  # operations that start kernels
LARGE = 2**20  # bytes; smaller slices of stacked arrays cost little
_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id iota "
    "add-dependency opt-barrier optimization-barrier domain get-dimension-size while conditional "
    "call".split()
)
_OURS = re.compile(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|mosaic_gpu|tpu_custom_call)')
_SLICES = {"dynamic-slice", "slice"}
_MOVES = _SLICES | set("copy transpose bitcast reshape convert".split())
# what a fusion that only cuts slices may contain beside moves: the computation of where they start
_INDICES = set("parameter constant tuple get-tuple-element add compare select broadcast".split())


@dataclass(frozen=True)
class Kernel:
    """An operation of the text.

    source: the operation of our sources.
    ours: whether it is a Pallas kernel.
    times: how often it runs.
    copied: bytes of a large slice that one run cuts out of a stacked array and writes beside it.
    """

    source: str
    ours: bool
    times: float
    copied: float = 0.0


def read_kernels(module: Module) -> list[Kernel]:
    """All kernels of a program."""
    found = []
    for i, times in module.runs():
        # of an asynchronous pair the start counts, or what it calls
        ends = i.opcode.endswith(("-done", "-update"))
        starts = i.opcode.endswith("-start") and i.called("calls")
        if not (ends or starts or i.opcode in _FREE):
            source, ours = short_source(i.op_name) or i.name, bool(_OURS.search(i.attributes))
            found.append(Kernel(source, ours, times, _copied(i, module)))
    return found


def counts(module: Module, cost: Cost) -> dict:
    """The kernels of a program as content of a JSON file: how many are started, the operations that
    start most of them, kernels of ours with FLOPs and bytes as they estimate full tables, and bytes
    of weights that are copied."""
    found, sources, ours = read_kernels(module), Counter(), {}
    for k in found:
        sources[k.source] += 0 if k.ours else k.times
    for work, calls in cost.kernels.items():
        each = {"calls": calls, "flops": calls * work.flops, "bytes": calls * work.bytes}
        ours.setdefault(work.name, Counter()).update(each)
    for name, total in ours.items():
        # without calls that the compiler left out because they equal others; a kernel that the text
        # does not name keeps all
        started = sum(k.times for k in found if k.ours and name in k.source.split("/"))
        share = min(1.0, started / total["calls"]) if started else 1.0
        ours[name] = {key: share * number for key, number in total.items()}
    return {
        "kernels": sum(k.times for k in found),
        "kernels_by_operation": dict((+sources).most_common(LISTED)),
        "kernels_of_ours": ours,
        "copied_weight_bytes": sum(k.times * k.copied for k in found),
    }


def _copied(i: Instruction, module: Module) -> float:
    """Bytes of a large slice that an instruction cuts, or a fusion that does nothing but cut large
    slices and perhaps turn them."""
    if i.opcode in _SLICES:
        return i.bytes if i.bytes >= LARGE else 0.0
    body = module.computations[i.called("calls")[0]] if i.opcode == "fusion" else []
    if any(inner.opcode not in _MOVES | _INDICES for inner in body):
        return 0.0
    # with large arrays it computes nothing, only with indices
    large = {inner.opcode for inner in body if inner.bytes >= LARGE}
    return i.bytes if large & _SLICES and large <= _MOVES | {"parameter"} else 0.0


# --- exchanges ---
#
# Bytes are those of the whole array on one device: what an all-gather or an all-reduce leaves,
# what a reduce-scatter begins with. What a device sends follows from them and from how many devices
# exchange, if it goes around a ring.

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


def exchanged(module: Module) -> list[dict]:
    """Exchanges of one kind by one operation of our sources, most bytes first, for a JSON file. Of
    several branches all count; a loop of unknown length counts once.

    Keys: kind, source, group (how many devices exchange with each other), calls, bytes and
    sent_bytes (around a ring) of all calls.
    """
    calls, moved = Counter(), Counter()
    for i, times in module.runs(everything=True):
        kind = i.opcode.removesuffix("-start")
        if kind in KINDS:
            group = _group(i.attributes)
            key = kind, short_source(i.op_name) or i.name, group
            sizes, count = array_bytes(i.shape), len(i.operands)
            if i.opcode.endswith("-start") and kind != "all-reduce":  # operands, then results
                sizes = sizes[count : 2 * count]
            calls[key] += times
            moved[key] += times * sum(sizes) * (group if kind == "reduce-scatter" else 1)
    found = []
    for key, size in moved.most_common():
        kind, source, group = key
        # around a ring; an all-reduce is a reduce-scatter, then an all-gather
        share = (1 + (kind == "all-reduce")) * (group - 1) / group
        if kind.startswith("collective-") and group > 1:
            share = 1.0
        row = {"kind": kind, "source": source, "group": group, "calls": calls[key]}
        found.append(row | {"bytes": size, "sent_bytes": size * share})
    return found


def _group(attributes: str) -> int:
    """Number of devices that exchange with each other; 2 where pairs do."""
    if listed := _LISTED.search(attributes):
        return len(listed[1].split(","))
    if counted := _COUNTED.search(attributes):
        return int(counted[2])
    if named := _MESH.search(attributes):
        sizes = dict(_AXIS.findall(named[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in _USED.findall(named[2]))
    return 2 if _PAIRS.search(attributes) else 1
