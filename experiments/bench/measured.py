"""Calls of kernels, compared with the reference, timed, and timed with all tiles."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.bench.report import Row, show_time
from pallas_kernels import bench
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.ragged_attention import tune
from pallas_kernels.ragged_attention.config import Config
from varjax.errors import UserError

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # relative Frobenius error
ROWS, HEADS = 2, 3  # of a comparison, where nothing else is asked for
SMALL_TOKENS = 64
OK, WRONG, REFUSED = "ok", "WRONG", "REFUSED"


def resized(spec: ArgSpec, small: bool, block_size: int, rows: int | None) -> ArgSpec:
    """A published shape with its slots in blocks of `block_size`, and with `rows`. small: cut down
    to what interpreters and CPUs take."""
    if small:
        spec = spec.reduced(tokens=min(SMALL_TOKENS, spec.tokens))
        spec = replace(spec, length=min(spec.length, spec.tokens))
    entries = -(-spec.entries * spec.block_size // block_size)
    return replace(spec, entries=entries, block_size=block_size, rows=rows or spec.rows)


def compare(operation: str, spec: ArgSpec, implementation: str) -> tuple[str, dict, str]:
    """(verdict, errors by result, the same or the kernel's reason in words)."""
    try:
        found = bench.errors(operation, spec, implementation)
    except NotImplementedError as error:  # it does not take this shape
        return REFUSED, {"refused": str(error)}, str(error)
    except UserError:
        raise
    except Exception as error:  # compilers and devices have many ways to fail
        why = bench.short(error, 400)
        return WRONG, {"failed": why}, why
    said = "  ".join(f"{part} {error:.1e}" for part, error in found.items())
    right = all(error < TOLERANCE[spec.dtype] for error in found.values())  # NaN is not
    return OK if right else WRONG, found, said


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
    allowed = TOLERANCE[row.spec.dtype]
    if row.seconds is None or row.error is None:
        return f"{call}: {row.note}"
    if not row.error < allowed:  # NaN is wrong too
        return f"{call}: error {row.error:.1e}, allowed is less than {allowed:.0e}"
    return None


def tuned(
    operation: str, specs: Sequence[ArgSpec], implementation: str, repeats: int
) -> list[tuple[ArgSpec, Config]]:
    """The fastest tiles of every shape, without the shapes for which none work. Prints what it
    finds."""
    found = []
    for spec in specs:
        trials = list(tune.trials(operation, spec, implementation, repeats))
        tiles, seconds, note = min(trials, key=lambda trial: trial[1])
        if math.isinf(seconds):
            print(f"error: {operation} {spec.name}: no tiles work: {note}", file=sys.stderr)
            continue
        found.append((spec, tiles))
        gain = f"{trials[0][1] / seconds:.2f} times as fast as the heuristic's"  # inf: these fail
        print(f"{operation} {spec.name}: {tiles}, {show_time(seconds)}, {gain}", flush=True)
    return found
