"""The report of `experiments.bench`: a row for each way to do an operation."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.bench import Work
from pallas_kernels.chips import Chip

HEADER = ("shape", "operation", "types", "budget", "way", "time", "GB/s", "TFLOP/s", "error")


@dataclass(frozen=True)
class Row:
    """One way that was measured.

    budget: share of the cache that heads own.
    seconds: None where the way could not run, with the reason in `note`.
    error: relative, against the reference in float32; None where that does not apply.
    """

    operation: str
    spec: ArgSpec
    budget: float
    way: str
    work: Work
    seconds: float | None = None
    error: float | None = None
    note: str = ""

    @property
    def call(self) -> dict[str, str]:
        """The call, which rows of several ways have in common."""
        types = {"dtype": self.spec.dtype, "kv_dtype": self.spec.pool_dtype.name}
        return {"shape": self.spec.name, "operation": self.operation} | types

    def as_json(self) -> dict:
        found = self.call | {"budget": self.budget, "way": self.way, "seconds": self.seconds}
        found |= {"bytes": self.work.bytes, "flops": self.work.flops}
        found |= {"error": self.error, "note": self.note}
        rates = ("bytes", "flops") if self.seconds else ()
        return found | {f"{name}_per_s": found[name] / self.seconds for name in rates}


def text(rows: list[Row], chip: Chip | None) -> str:
    """All rows in columns. Bytes and operations are the least that a call needs, so a rate may
    exceed what the memory offers where a cache helps. Percentages are shares of the chip's peak."""
    return columns([(*HEADER, ""), *((*_cells(row, chip), row.note) for row in rows)], "<<<<<>>>><")


def columns(cells: Sequence[Sequence[str]], sides: str) -> str:
    """Rows of cells as lines. sides: "<" or ">" for each column, where its cells lie."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(line.format(*cell).rstrip() for cell in cells)


def _cells(row: Row, chip: Chip | None) -> tuple[str, ...]:
    shape, operation, dtype, kv_dtype = row.call.values()
    types = dtype if kv_dtype == dtype else f"{dtype}, pool {kv_dtype}"
    where = (shape, operation, types, f"{row.budget:g}", row.way)
    if row.seconds is None:
        return (*where, "-", "-", "-", "-")
    bandwidth, peak = (chip.bandwidth, chip.bf16_flops) if chip else (None, None)
    if jnp.dtype(dtype).itemsize != 2:
        peak = None  # the table of chips knows 16-bit products only
    error = "-" if row.error is None else f"{row.error:.1e}"
    rates = (
        rate(row.work.bytes / row.seconds, 1e9, bandwidth),
        rate(row.work.flops / row.seconds, 1e12, peak) if row.work.flops else "-",
    )
    return (*where, show_time(row.seconds), *rates, error)


def rate(value: float, unit: float, peak: float | None) -> str:
    """A rate in a unit, with its share of the peak where that is known."""
    share = f" ({value / peak:4.0%})" if peak else ""
    return f"{value / unit:.3g}{share}"


def show_time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
