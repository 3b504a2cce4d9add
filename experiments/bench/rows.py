"""Rows of the table of `experiments.bench --machine`: what was measured, and what the cost model
says of the same work."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import jax

from experiments.aot import efficiencies
from experiments.aot.modelled import Modelled
from experiments.aot.work import Work, by_operation, works
from pallas_kernels.chips import Chip
from varjax.engine.cost import PallasWork, program_cost

PROGRAMS = ("codes", "pixels", "pixels, by type")  # operations that are whole programs


@dataclass(frozen=True)
class Call:
    """What was measured.

    shape: a published shape, product or model. way: the implementation.
    images: of a batch; None where there is no batch. share: of the full cache that heads own.
    """

    operation: str
    shape: str
    way: str
    types: str
    images: int | None = None
    share: float | None = None


@dataclass(frozen=True)
class Row:
    """A measured call.

    seconds: None where nothing was timed; `note` then says why, or what was found instead.
    flops, bytes: the least that it computes and moves.
    work: of its kernels, {**fields of `aot.work.Work`, "calls"}; empty where that is not known.
    modelled: seconds by the model of `experiments.aot`. expected: by what was measured on this
      chip before. None where the chip or the work is not known.
    """

    call: Call
    seconds: float | None = None
    flops: float = 0.0
    bytes: float = 0.0
    note: str = ""
    work: tuple[Mapping, ...] = ()
    modelled: float | None = None
    expected: float | None = None

    @classmethod
    def read(cls, content: Mapping) -> "Row":
        """From `as_json`."""
        given = {**content, "call": Call(**content["call"]), "work": tuple(content["work"])}
        return cls(**given)

    def as_json(self) -> dict:
        return asdict(self)

    def with_kernels(self, pallas: Counter[PallasWork], chip: Chip | None) -> "Row":
        """With what the cost model says of its Pallas kernels."""
        if not pallas or chip is None:
            return self
        if chip.gpu is None:
            return replace(self, modelled=Modelled(chip, [], pallas).pallas_seconds)
        return self.with_work(works((), pallas, chip), chip)

    def with_work(self, work: Mapping[Work, float], chip: Chip) -> "Row":
        """With what the cost model says of a GPU's kernels."""
        listed = tuple({**asdict(w), "calls": float(calls)} for w, calls in work.items())
        record = efficiencies.of(chip)
        parts = by_operation(work, chip, record).values()
        ideal, expected = (sum(getattr(p, n) for p in parts) for n in ("ideal", "expected"))
        return replace(self, work=listed, modelled=ideal, expected=expected if record else None)

    def of_work(self) -> Counter[Work]:
        """{work of a call of a kernel: calls}."""
        found: Counter[Work] = Counter()
        for given in self.work:
            found[Work(**{k: v for k, v in given.items() if k != "calls"})] += given["calls"]
        return found


@dataclass(frozen=True)
class Found:
    """What a step found: rows, and tiles to keep (`tiles.Tiles` as JSON)."""

    rows: list[Row]
    tuned: list[dict] = field(default_factory=list)

    def as_json(self) -> dict:
        return {"rows": [row.as_json() for row in self.rows], "tuned": self.tuned}


def kernels_of(step: Callable, arguments: tuple) -> Counter[PallasWork]:
    """The Pallas kernels that a function calls."""
    return program_cost(jax.make_jaxpr(step)(*arguments)).kernels
