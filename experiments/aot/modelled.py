"""The modelled cost of a compiled program, read from its text: kernels, bytes, products and
seconds, per loop. It is a model, not a measurement: it ranks programs and shows waste. `kernels`
looks at one kernel, `reader` finds all of them.

Pallas kernels are opaque in the text. They are counted there, and their work is the estimate that
the traced program has (`PallasWork`), done at `PALLAS_REACHED` of the peaks. That holds for a TPU,
too: the compiler's cycles for them are left out.

Where something was measured on the chip (`efficiencies`), the same work gives the time expected
there beside it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from experiments.aot import efficiencies
from experiments.aot.efficiencies import Record
from experiments.aot.hlo import Module
from experiments.aot.kernels import Kernel
from experiments.aot.reader import Reader
from experiments.aot.work import PALLAS_REACHED, Share, Work, by_operation, works
from pallas_kernels.chips import Chip
from varjax.engine.cost import PallasWork


@dataclass(frozen=True)
class Modelled:
    """All kernels of a program.

    pallas: {estimated work of a Pallas kernel: how often it is called}.
    loops_of_unknown_length: how many loops are counted as if they ran once.
    trips: rounds of every loop, None where unknown, in the order of the text, inner ones after
      their outer one.
    """

    chip: Chip
    kernels: list[Kernel]
    pallas: Counter = field(default_factory=Counter)
    loops_of_unknown_length: int = 0
    trips: Sequence[int | None] = ()

    @classmethod
    def of(cls, text: str, chip: Chip, pallas: Counter) -> "Modelled":
        """Read a compiled program. pallas: {PallasWork: calls} of the traced one."""
        module = Module.parse(text)
        reader = Reader(module, chip).read(module.entry)
        kept = _kept(pallas, reader.kernels)
        trips = module.all_trips(module.entry)
        return cls(chip, reader.kernels, kept, reader.unknown_loops, trips)

    def total(self, name: str, *kinds: str) -> float:
        """The sum of a field of `Kernel` over all runs of kernels of these kinds (none: all)."""
        return sum(k.times * getattr(k, name) for k in self.kernels if not kinds or k.kind in kinds)

    def calls(self, *kinds: str) -> float:
        """How many kernels of these kinds (none: all) are started."""
        return sum(k.times for k in self.kernels if not kinds or k.kind in kinds)

    @property
    def pallas_seconds(self) -> float:
        return sum(n * self.seconds_of(work) for work, n in self.pallas.items())

    @property
    def seconds(self) -> float | None:
        """Seconds of the program. None for a TPU whose clock is not published, because its compiler
        estimates cycles only."""
        if self.chip.platform == "tpu" and not self.chip.clock:
            return None
        return self.total("seconds") + self.pallas_seconds

    @property
    def cycles(self) -> float | None:
        """Cycles of a TPU: the compiler's, and those of Pallas kernels if the clock is known. None
        for a GPU."""
        if self.chip.platform != "tpu":
            return None
        return self.total("cycles") + self.pallas_seconds * (self.chip.clock or 0.0)

    def seconds_of(self, work: PallasWork) -> float:
        """Seconds of one call of a Pallas kernel."""
        computing, moving = work.flops / self.chip.bf16_flops, work.bytes / self.chip.bandwidth
        return max(computing, moving) / PALLAS_REACHED

    # --- as measured on the chip ---

    @property
    def record(self) -> Record | None:
        """What was measured on the chip; None for most."""
        return efficiencies.of(self.chip)

    def work(self) -> Counter[Work]:
        """{work of a call: how often it is called}, of a GPU."""
        return works(self.kernels, self.pallas, self.chip)

    def by_operation(self) -> dict[str, Share]:
        """{operation: its part}; empty for a TPU, whose compiler counts cycles."""
        if self.chip.platform == "tpu":
            return {}
        return by_operation(self.work(), self.chip, self.record)

    @property
    def expected_seconds(self) -> float | None:
        """Seconds of the program by what was measured on the chip; None without a record."""
        if self.record is None:
            return None
        return sum(share.expected for share in self.by_operation().values())

    # --- lists ---

    def costliest(self, count: int) -> list[Kernel]:
        """Operations with most seconds first. Their `times`, `seconds` and other costs are sums
        over all kernels of the operation."""
        found: dict[tuple, Kernel] = {}
        for k in self.kernels:
            whole = _all_runs(k)
            key = k.source or k.name, k.kind
            found[key] = _plus(found[key], whole) if key in found else whole
        ordered = sorted(found.values(), key=lambda k: (-k.seconds, -k.cycles))
        return [k for k in ordered if k.kind != "pallas"][:count]

    def by_loop(self) -> list[tuple[str, Kernel]]:
        """(loop, sums over the kernels of its body without inner loops), in the order of the
        text."""
        found: dict[str, Kernel] = {}
        for k in self.kernels:
            whole = _all_runs(k)
            found[k.loop] = _plus(found[k.loop], whole) if k.loop in found else whole
        return list(found.items())

    @property
    def unknown(self) -> list[str]:
        return sorted({f"{k.source or k.name}" for k in self.kernels if k.kind == "unknown"})


def _kept(pallas: Counter, kernels: list[Kernel]) -> Counter:
    """Calls of the traced program without calls that the compiler removed because they equal
    others. Calls that the text does not name are all kept."""
    traced, found = Counter(), Counter()
    for work, calls in pallas.items():
        traced[work.name] += calls
        named = (
            k.times for k in kernels if k.kind == "pallas" and work.name in k.source.split("/")
        )
        found[work.name] = sum(named)
    shares = {n: min(1.0, found[n] / traced[n]) if found[n] else 1.0 for n in traced}
    return Counter({work: calls * shares[work.name] for work, calls in pallas.items()})


def _all_runs(k: Kernel) -> Kernel:
    """A kernel with what all of its runs cost together."""
    return replace(
        k,
        bytes=k.times * k.bytes,
        flops=k.times * k.flops,
        seconds=k.times * k.seconds,
        cycles=k.times * k.cycles,
    )


def _plus(a: Kernel, b: Kernel) -> Kernel:
    """`a` with the runs and costs of both."""
    return replace(
        a,
        times=a.times + b.times,
        bytes=a.bytes + b.bytes,
        flops=a.flops + b.flops,
        seconds=a.seconds + b.seconds,
        cycles=a.cycles + b.cycles,
    )
