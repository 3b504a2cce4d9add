"""The kernels of a compiled program, loop by loop, as it runs them.

Of branches the costliest counts. Where a loop of known length asks whether its counter equals a
number, it does in one round: the branch of that round counts once, the other one in all others.
"""

from dataclasses import dataclass, replace

from experiments.aot.hlo import Computation, Instruction, Module
from experiments.aot.kernels import Costs, Kernel, first
from pallas_kernels.chips import Chip

_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id iota "
    "add-dependency opt-barrier optimization-barrier domain get-dimension-size".split()
)
_SAME = set("bitcast convert copy reshape fusion".split())  # between a condition and its comparison
_PLAIN_NUMBERS = set("parameter get-tuple-element dynamic-slice constant".split())


@dataclass(frozen=True)
class Body:
    """What is read: the body of a loop, or what is outside of all. trips: rounds of this loop.
    times: how often it runs, with those of the loops around it."""

    loop: str = ""
    trips: int = 1
    times: float = 1.0


class Reader:
    """Walks through a program as it runs."""

    def __init__(self, module: Module, chip: Chip):
        self.module, self.chip, self.costs = module, chip, Costs(module, chip)
        self.kernels: list[Kernel] = []
        self.unknown_loops = 0

    def read(self, name: str, body: Body) -> None:
        computation = self.module[name]
        for instruction in computation:
            self._one(instruction, computation, body)

    def _one(self, i: Instruction, within: Computation, body: Body) -> None:
        if i.opcode == "while":
            trips = self.module.trips(i)
            self.unknown_loops += trips is None
            [inner] = i.called("body")
            said, trips = f"{inner} ({trips or '?'} x)", trips or 1
            self.read(inner, Body(said, trips, body.times * trips))
        elif i.opcode == "conditional":
            self._branches(i, within, body)
        elif i.opcode == "call":
            for inner in i.called("to_apply", "calls"):
                self.read(inner, body)
        elif i.opcode.endswith("-start") and i.called("calls"):
            for inner in i.called("calls"):
                self.read(inner, body)
        elif not (i.opcode in _FREE or i.opcode.endswith(("-done", "-update"))):
            self.kernels.append(self.costs.kernel(i, within, body.loop, body.times))

    def _branches(self, i: Instruction, within: Computation, body: Body) -> None:
        two, several = i.called("false_computation", "true_computation"), "branch_computations"
        readers = []
        for name in two or i.called(several):
            readers.append(Reader(self.module, self.chip))
            readers[-1].read(name, body)
        self.unknown_loops += max(r.unknown_loops for r in readers)
        known = len(readers) == 2 and body.trips > 1
        if known and self._asks_for_one_round(i.operands[0], within):
            shares = (body.trips - 1) / body.trips, 1 / body.trips  # of false, of true
        else:
            costs = [sum(k.times * (k.seconds + k.cycles) for k in r.kernels) for r in readers]
            shares = [float(number == costs.index(max(costs))) for number in range(len(costs))]
        for reader, share in zip(readers, shares, strict=True):
            self.kernels += [replace(k, times=k.times * share) for k in reader.kernels if share]

    def _asks_for_one_round(self, name: str, within: Computation) -> bool:
        """Whether a condition is that two whole numbers are equal which are not computed for it: a
        counter, or what a list has in its place, and a constant. What does not change from round to
        round is not compared in the loop."""
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
