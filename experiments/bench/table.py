"""Results of `experiments.bench`: one row per way to do an operation, the table, the summary."""

import math
from dataclasses import asdict, dataclass

import jax.numpy as jnp

from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.chips import Chip
from pallas_kernels.ragged_attention.bench import Work

HEADER = ("shape", "operation", "types", "budget", "way", "time", "GB/s", "TFLOP/s", "error")


@dataclass(frozen=True)
class Row:
    """One measured way. seconds: None where it could not run, with the reason in `note`. error:
    relative, against the reference in float32; None where that does not apply."""

    shape: str
    operation: str
    dtype: str
    kv_dtype: str
    budget: float
    way: str
    seconds: float | None
    bytes: float
    flops: float
    error: float | None
    note: str = ""

    @classmethod
    def of(cls, operation: str, spec: ArgSpec, budget: float, way: str, work: Work, **result):
        return cls(
            shape=spec.name,
            operation=operation,
            dtype=spec.dtype,
            kv_dtype=spec.pool_dtype.name,
            budget=budget,
            way=way,
            bytes=work.bytes,
            flops=work.flops,
            **result,
        )

    def as_json(self) -> dict:
        rates = {}
        if self.seconds:
            rates = {
                "bytes_per_s": self.bytes / self.seconds,
                "flops_per_s": self.flops / self.seconds,
            }
        return asdict(self) | rates


def table(rows: list[Row], chip: Chip | None) -> str:
    """Columns in plain text. Bytes and operations are the least that a call needs, so rates may
    exceed what the memory offers where a cache helps; percent are of the chip's peak."""
    cells = [HEADER, *(_cells(row, chip) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    left = len(HEADER) - 4
    lines = []
    for line, row in zip(cells, [None, *rows], strict=True):
        parts = [c.ljust(w) for c, w in zip(line[:left], widths[:left], strict=True)]
        parts += [c.rjust(w) for c, w in zip(line[left:], widths[left:], strict=True)]
        lines.append("  ".join([*parts, row.note if row else ""]).rstrip())
    return "\n".join(lines)


def _cells(row: Row, chip: Chip | None) -> tuple[str, ...]:
    types = row.dtype if row.kv_dtype == row.dtype else f"{row.dtype}, pool {row.kv_dtype}"
    where = (row.shape, row.operation, types, f"{row.budget:g}", row.way)
    if row.seconds is None:
        return (*where, "-", "-", "-", "-")
    bandwidth, peak = (chip.bandwidth, chip.bf16_flops) if chip else (None, None)
    if jnp.dtype(row.dtype).itemsize != 2:
        peak = None  # the table of chips knows 16-bit products only
    error = "-" if row.error is None else f"{row.error:.1e}"
    rates = (
        _rate(row.bytes / row.seconds, 1e9, bandwidth),
        _rate(row.flops / row.seconds, 1e12, peak) if row.flops else "-",
    )
    return (*where, show_time(row.seconds), *rates, error)


def _rate(value: float, unit: float, peak: float | None) -> str:
    share = f" ({value / peak:4.0%})" if peak else ""
    return f"{value / unit:.3g}{share}"


def show_time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def summary(rows: list[Row], kernel: str) -> list[str]:
    """How much faster the kernel is than each other way: geometric means over what both ran."""
    lines = []
    for operation in dict.fromkeys(row.operation for row in rows):
        for budget in dict.fromkeys(row.budget for row in rows):
            mine = [r for r in rows if (r.operation, r.budget) == (operation, budget)]
            for way in dict.fromkeys(r.way for r in mine if r.way != kernel):
                ratios = _ratios(mine, kernel, way)
                if ratios:
                    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                    lines.append(
                        f"{operation} at budget {budget:g}: {kernel} takes {1 / mean:.2f} of the "
                        f"time of {way} ({len(ratios)} shapes, {min(ratios):.2f} to "
                        f"{max(ratios):.2f} times as fast)"
                    )
    return lines or ["nothing to compare"]


def _ratios(rows: list[Row], kernel: str, way: str) -> list[float]:
    def times(name: str) -> dict:
        return {
            (r.shape, r.dtype, r.kv_dtype): r.seconds for r in rows if r.way == name and r.seconds
        }

    mine, other = times(kernel), times(way)
    return [other[key] / mine[key] for key in mine if key in other]
