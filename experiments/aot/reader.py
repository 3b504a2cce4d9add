"""The kernels of a compiled program, loop by loop, as it runs them.

Only the costliest of several branches counts. But a loop of known length may ask whether its
counter equals a number. That is true in one round: the branch of that round counts once, the other
branch counts in all other rounds.
"""

from dataclasses import replace

from experiments.aot.hlo import Computation, Instruction, Module
from experiments.aot.kernels import Costs, Kernel, first
from pallas_kernels.chips import Chip

_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id iota "
    "add-dependency opt-barrier optimization-barrier domain get-dimension-size".split()
)
# what may stand between a condition and the comparison that it comes from
_SAME = set("bitcast convert copy reshape fusion".split())
_PLAIN_NUMBERS = set("parameter get-tuple-element dynamic-slice constant".split())


class Reader:
    """Walks through what a loop runs, or through what stands outside all loops.

    loop: a name for people, empty outside. trips: rounds of this loop. times: how often its body
    runs, with the rounds of the loops around it. kernels, unknown_loops: what was found.
    """

    def __init__(
        self, module: Module, chip: Chip, loop: str = "", trips: int = 1, times: float = 1.0
    ):
        self.module, self.chip, self.costs = module, chip, Costs(module, chip)
        self.loop, self.trips, self.times = loop, trips, times
        self.kernels: list[Kernel] = []
        self.unknown_loops = 0

    def read(self, name: str) -> "Reader":
        """Walk through a computation; returns the reader itself."""
        computation = self.module[name]
        for instruction in computation:
            self._one(instruction, computation)
        return self

    def _one(self, i: Instruction, within: Computation) -> None:
        if i.opcode == "while":
            self._loop(i)
        elif i.opcode == "conditional":
            self._branches(i, within)
        elif i.opcode == "call":
            for inner in i.called("to_apply", "calls"):
                self.read(inner)
        elif i.opcode.endswith("-start") and i.called("calls"):
            for inner in i.called("calls"):
                self.read(inner)
        elif not (i.opcode in _FREE or i.opcode.endswith(("-done", "-update"))):
            self.kernels.append(self.costs.kernel(i, within, self.loop, self.times))

    def _loop(self, i: Instruction) -> None:
        trips, [body] = self.module.trips(i), i.called("body")
        loop, rounds = f"{body} ({trips or '?'} x)", trips or 1
        inner = Reader(self.module, self.chip, loop, rounds, self.times * rounds).read(body)
        self.kernels += inner.kernels
        self.unknown_loops += inner.unknown_loops + (trips is None)

    def _branches(self, i: Instruction, within: Computation) -> None:
        two, several = i.called("false_computation", "true_computation"), "branch_computations"
        readers = []
        for name in two or i.called(several):
            reader = Reader(self.module, self.chip, self.loop, self.trips, self.times)
            readers.append(reader.read(name))
        self.unknown_loops += max(r.unknown_loops for r in readers)
        known = len(readers) == 2 and self.trips > 1
        if known and self._asks_for_one_round(i.operands[0], within):
            shares = (self.trips - 1) / self.trips, 1 / self.trips  # of false, of true
        else:
            costs = [sum(k.times * (k.seconds + k.cycles) for k in r.kernels) for r in readers]
            shares = [float(number == costs.index(max(costs))) for number in range(len(costs))]
        for reader, share in zip(readers, shares, strict=True):
            self.kernels += [replace(k, times=k.times * share) for k in reader.kernels if share]

    def _asks_for_one_round(self, name: str, within: Computation) -> bool:
        """Whether a condition says that two whole numbers are equal and neither is computed for it:
        a counter, or a list's entry at the counter, and a constant. A comparison of two numbers
        that never change would not be made in the loop."""
        found, within = self._source(name, within)
        if found is None or found.opcode != "compare" or "direction=EQ" not in found.attributes:
            return False
        number = first(within, found.operands[0])
        sides = [self._source(side, within)[0] for side in found.operands]
        known = all(side is not None and side.opcode in _PLAIN_NUMBERS for side in sides)
        return known and number.size == 1 and number.kind in ("s32", "u32")

    def _source(self, name: str, within: Computation) -> tuple[Instruction | None, Computation]:
        """Where a value is made, and the computation that it is made in."""
        found = within.get(name)
        while found and found.opcode in _SAME:
            if found.opcode == "fusion":
                within = self.module[found.called("calls")[0]]
                found = within.root
            else:
                found = within.get(found.operands[0])
        return found, within
