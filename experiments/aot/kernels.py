"""The kernels that a compiled program starts, and the weights that it copies, read from its text.

Outside fusions every operation that computes or moves numbers is a kernel, as often as its loops
run. What is inside a kernel of ours no text says.
"""

import re
from dataclasses import dataclass

from experiments.aot.buffers import short_source
from experiments.aot.hlo import Instruction, Module

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


def read(module: Module) -> list[Kernel]:
    """All kernels of a program."""
    return [
        Kernel(
            source=short_source(i.op_name) or i.name,
            ours=bool(_OURS.search(i.attributes)),
            times=times,
            copied=_copied(i, module),
        )
        for i, times in module.runs()
        if not _is_free(i)
    ]


def _is_free(i: Instruction) -> bool:
    # of an asynchronous pair the start counts, or what it calls
    wraps = i.opcode.endswith("-start") and i.called("calls")
    return bool(wraps) or i.opcode in _FREE or i.opcode.endswith(("-done", "-update"))


def _copied(i: Instruction, module: Module) -> float:
    if i.opcode in _SLICES:
        return i.bytes if i.bytes >= LARGE else 0.0
    only = i.opcode == "fusion" and _only_slices(module[i.called("calls")[0]])
    return i.bytes if only else 0.0


def _only_slices(body: list[Instruction]) -> bool:
    """Whether a fusion does nothing but cut large slices and perhaps turn them."""
    if any(i.opcode not in _MOVES | _INDICES for i in body):
        return False
    large = [i.opcode for i in body if i.bytes >= LARGE]
    if any(opcode not in _MOVES and opcode != "parameter" for opcode in large):
        return False  # it computes with large arrays, not only with indices
    return any(opcode in _SLICES for opcode in large)
