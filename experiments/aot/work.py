"""The work of a compiled program by operation, and its time by the efficiencies of a chip.

`kernels` and `modelled` say what every kernel moves and computes. Here that work is sorted by the
operations that were measured (`efficiencies.OPERATIONS`). Their numbers give the time expected on
that chip; what was not measured takes what the model assumes of all chips.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from experiments.aot.efficiencies import GAPS, Efficiency, Record, of_kernel
from experiments.aot.kernels import REACHED, START, Kernel
from pallas_kernels.chips import Chip
from varjax.engine.cost import PallasWork

PALLAS_REACHED = 0.85  # share of the peaks, where nothing was measured
SMALL = ", smaller than measured"
ASSUMED = Efficiency(START, REACHED["bandwidth"], REACHED["flops"], basis="assumed")
ASSUMED_OF_OURS = Efficiency(START, PALLAS_REACHED, PALLAS_REACHED, basis="assumed")


@dataclass(frozen=True)
class Work:
    """What one call of a kernel does.

    operation: one of `efficiencies.OPERATIONS`.
    ours: whether it is a kernel of ours.
    bytes, flops: that it moves and computes.
    rate: peak operations per second of the units that compute.
    programs, copies: what programs do one after another (`PallasWork`); 0: not said.
    """

    operation: str
    ours: bool
    bytes: float
    flops: float
    rate: float
    programs: int = 0
    copies: float = 0.0

    def seconds(self, chip: Chip, efficiency: Efficiency) -> float:
        """Seconds of the call at an efficiency."""
        moving = self.bytes / chip.bandwidth
        computing = self.flops / self.rate if self.flops else 0.0
        if not (self.programs and efficiency.copy):
            return efficiency.seconds(moving, computing)
        turns = (self.programs, self.copies, chip.gpu.cores)
        return efficiency.seconds_in_turns(moving, computing, *turns)

    def efficiency(self, record: Record | None) -> Efficiency:
        """What a record says of calls of the operation as large as this one, or else what is
        assumed."""
        found = record.operations.get(self.operation) if record else None
        if found and self.bytes >= found.least_bytes and self.flops >= found.least_flops:
            return found
        return ASSUMED_OF_OURS if self.ours else ASSUMED


def works(
    kernels: Iterable[Kernel], pallas: Mapping[PallasWork, float], chip: Chip
) -> Counter[Work]:
    """{work of a call: how often it is called}. kernels: of the compiled text, those of Pallas
    among them, whose work is `pallas`."""
    found: Counter[Work] = Counter()
    for k in kernels:
        if k.kind != "pallas":
            found[Work(_operation(k, chip), False, k.bytes, k.flops, k.rate)] += k.times
    for p, calls in pallas.items():
        numbers = (p.bytes, p.flops, chip.bf16_flops, p.programs, p.copies)
        found[Work(of_kernel(p.name), True, *numbers)] += calls
    return found


def _operation(k: Kernel, chip: Chip) -> str:
    if k.kind != "product":
        return "fusions"
    return "products" if k.rate == chip.bf16_flops else "products, other types"


@dataclass(frozen=True)
class Share:
    """An operation's part of a program.

    calls: how many.
    ideal: seconds by the model alone.
    expected: seconds by what was measured on the chip.
    basis: how the latter is known: "measured", "counted" or "assumed".
    """

    calls: float
    ideal: float
    expected: float
    basis: str


def by_operation(work: Mapping[Work, float], chip: Chip, record: Record | None) -> dict[str, Share]:
    """{operation: its part}. Calls that are smaller than all that were measured, whose time is
    assumed, stand apart. Gaps follow other calls than these, because the assumed start of a call
    has them in it."""
    sums: dict[tuple[str, str], Counter] = {}
    for w, calls in work.items():
        efficiency = w.efficiency(record)
        each = {"calls": calls, "ideal": calls * w.seconds(chip, w.efficiency(None))}
        each["expected"] = calls * w.seconds(chip, efficiency)
        sums.setdefault((w.operation, efficiency.basis), Counter()).update(each)
    known = record.operations if record else {}
    found = {}
    for (name, basis), total in sorted(sums.items(), key=lambda item: -item[1]["expected"]):
        small = basis == "assumed" and name in known
        found[name + SMALL * small] = Share(**total, basis=basis)
    if GAPS in known:
        calls = sum(share.calls for share in found.values() if share.basis != "assumed")
        found[GAPS] = Share(calls, 0.0, calls * known[GAPS].call, known[GAPS].basis)
    return found
