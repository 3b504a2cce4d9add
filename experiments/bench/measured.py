"""Calls of kernels, compared with the reference, timed, and timed with all tiles."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from pallas_kernels import bench
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.ragged_attention import tune
from pallas_kernels.ragged_attention.config import Config
from varjax.core.errors import UserError

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


def timed(operation: str, spec: ArgSpec, budget: float, way: str, repeats: int) -> dict:
    """One way and its seconds; None, and a note that says why, where it cannot be timed. budget:
    share of the cache that heads own."""
    row = {"shape": spec.name, "operation": operation, "dtype": spec.dtype}
    row |= {"kv_dtype": spec.pool_dtype.name, "budget": budget, "way": way}
    try:
        seconds = bench.measure(bench.prepare(operation, spec, budget, way), repeats)
        return row | {"seconds": seconds, "note": ""}
    except Exception as problem:  # out of memory, a library that refuses the call
        return row | {"seconds": None, "note": bench.short(problem)}


def tuned(
    operation: str, specs: Sequence[ArgSpec], implementation: str, repeats: int
) -> list[tuple[ArgSpec, Config]]:
    """The fastest tiles of every shape, without those for which none work. Prints what it finds."""
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


def table(rows: Sequence[dict]) -> str:
    """Results of `timed`, in columns."""
    shown = ("shape", "operation", "dtype", "kv_dtype", "budget", "way")
    cells = [
        (*(str(row[name]) for name in shown), show_time(row["seconds"]), row["note"])
        for row in rows
    ]
    return columns([(*shown, "time", ""), *cells], "<<<<<<><")


def columns(cells: Sequence[Sequence[str]], sides: str) -> str:
    """Rows of cells as lines. sides: "<" or ">" for each column, where its cells lie."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(line.format(*cell).rstrip() for cell in cells)


def show_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
