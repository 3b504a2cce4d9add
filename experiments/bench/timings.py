"""Timing one way of an operation, and comparing what it computes with the reference."""

from dataclasses import replace

import numpy as np

from experiments.bench import checks
from experiments.bench.report import Row
from pallas_kernels import bench
from pallas_kernels.arg_specs import ArgSpec


def timed(operation: str, spec: ArgSpec, budget: float, way: str, repeats: int) -> Row:
    """One way, timed and compared with the reference. Where that fails, the row has a note instead
    of seconds or of an error."""
    own, dense = bench.compressed(spec, budget), way.startswith(bench.DENSE)
    at_work = spec if dense else own
    row = Row(operation, own, budget, way, bench.OPERATIONS[operation].work(at_work))
    if bench.holds_scores(operation, way) and not bench.fits(spec):
        return replace(row, note="its matrix of scores does not fit")
    try:
        seconds = bench.measure(bench.prepare(operation, spec, budget, way), repeats)
        row = replace(row, seconds=seconds)
        if not dense:
            # one row, two heads: enough to see whether numbers are right
            few = replace(own, rows=1, heads=min(2, own.heads), filling="random")
            found = bench.errors(operation, few, way).values()
            row = replace(row, error=float(np.max(list(found))))  # unlike max, it does not lose NaN
    except Exception as problem:  # out of memory, a library that refuses the call
        row = replace(row, note=bench.short(problem))
    return row


def failure(row: Row) -> str | None:
    """The reason why a row of the timed kernel is a failure, or None."""
    call = f"{row.way}: {row.operation} {row.spec.name} at budget {row.budget:g}"
    allowed = checks.TOLERANCE[row.spec.dtype]
    if row.seconds is None or row.error is None:
        return f"{call}: {row.note}"
    if not row.error < allowed:  # NaN is wrong too
        return f"{call}: error {row.error:.1e}, allowed is less than {allowed:.0e}"
    return None
