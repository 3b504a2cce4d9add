"""What a compiled program will cost, read from its text: kernels, bytes, products and seconds, per
loop. A model, not a measurement: it ranks programs and shows waste. One kernel: `kernels`,
all of them: `reader`.

Pallas kernels are opaque here: they are counted, and their work is what their authors estimate
(`PallasWork`, from the traced program) at `PALLAS_REACHED` of the peaks. On a TPU too: the
compiler's cycles for them are left out.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from experiments.aot.hlo import Module
from experiments.aot.kernels import Kernel
from experiments.aot.reader import Reader
from pallas_kernels.chips import Chip
from varjax.engine.cost import PallasWork

PALLAS_REACHED = 0.85


@dataclass(frozen=True)
class Modelled:
    """All kernels of a program, and what its Pallas kernels are estimated to do.

    loops_of_unknown_length: counted once.
    """

    chip: Chip
    kernels: list[Kernel]
    pallas: Counter = field(default_factory=Counter)
    loops_of_unknown_length: int = 0

    @classmethod
    def of(cls, text: str, chip: Chip, pallas: Counter) -> "Modelled":
        """Read a compiled program. pallas: {PallasWork: calls} of the traced one."""
        module = Module.parse(text)
        reader = Reader(module, chip).read(module.entry)
        return cls(chip, reader.kernels, _kept(pallas, reader.kernels), reader.unknown_loops)

    def total(self, name: str, *kinds: str) -> float:
        """Sum of a field of `Kernel` over all runs, of these kinds only (none: of all)."""
        return sum(k.times * getattr(k, name) for k in self.kernels if not kinds or k.kind in kinds)

    def calls(self, *kinds: str) -> float:
        """Kernels that are started, of these kinds only (none: all)."""
        return sum(k.times for k in self.kernels if not kinds or k.kind in kinds)

    @property
    def pallas_seconds(self) -> float:
        return sum(n * self.seconds_of(work) for work, n in self.pallas.items())

    @property
    def seconds(self) -> float | None:
        """None of a TPU whose clock is not published: its compiler speaks of cycles only."""
        if self.chip.platform == "tpu" and not self.chip.clock:
            return None
        return self.total("seconds") + self.pallas_seconds

    @property
    def cycles(self) -> float | None:
        """Of a TPU: the compiler's, and those of Pallas kernels if the clock is known; None on a
        GPU."""
        if self.chip.platform != "tpu":
            return None
        return self.total("cycles") + self.pallas_seconds * (self.chip.clock or 0.0)

    def seconds_of(self, work: PallasWork) -> float:
        """Of one call."""
        computing, moving = work.flops / self.chip.bf16_flops, work.bytes / self.chip.bandwidth
        return max(computing, moving) / PALLAS_REACHED

    def costliest(self, count: int) -> list[Kernel]:
        """Operations by all their seconds, most first; `times`, `seconds` and the rest summed."""
        found: dict[tuple, Kernel] = {}
        for k in self.kernels:
            whole = _times(k)
            key = k.source or k.name, k.kind
            found[key] = _plus(found[key], whole) if key in found else whole
        ordered = sorted(found.values(), key=lambda k: (-k.seconds, -k.cycles))
        return [k for k in ordered if k.kind != "pallas"][:count]

    def by_loop(self) -> list[tuple[str, Kernel]]:
        """(loop, sums over all that its body runs, inner loops apart), in the order of the text."""
        found: dict[str, Kernel] = {}
        for k in self.kernels:
            whole = _times(k)
            found[k.loop] = _plus(found[k.loop], whole) if k.loop in found else whole
        return list(found.items())

    @property
    def unknown(self) -> list[str]:
        return sorted({f"{k.source or k.name}" for k in self.kernels if k.kind == "unknown"})


def _kept(pallas: Counter, kernels: list[Kernel]) -> Counter:
    """Calls of the traced program without those that the compiler found to be equal to others; all
    where the text does not name them."""
    traced, found = Counter(), Counter()
    for work, calls in pallas.items():
        traced[work.name] += calls
        named = (
            k.times for k in kernels if k.kind == "pallas" and work.name in k.source.split("/")
        )
        found[work.name] = sum(named)
    shares = {n: min(1.0, found[n] / traced[n]) if found[n] else 1.0 for n in traced}
    return Counter({work: calls * shares[work.name] for work, calls in pallas.items()})


def _times(k: Kernel) -> Kernel:
    names = ("bytes", "flops", "seconds", "cycles")
    return replace(k, **{name: k.times * getattr(k, name) for name in names})


def _plus(a: Kernel, b: Kernel) -> Kernel:
    names = ("times", "bytes", "flops", "seconds", "cycles")
    return replace(a, **{name: getattr(a, name) + getattr(b, name) for name in names})
