"""Comparing a kernel with the reference: shapes that are compared, and verdicts."""

import math
from collections.abc import Collection
from dataclasses import replace

from pallas_kernels import bench
from pallas_kernels.arg_specs import ArgSpec
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


def cases(
    operation: str, spec: ArgSpec, rows: int | None = None, heads: int | None = None
) -> list[ArgSpec]:
    """The calls that are compared: one for each filling of tables that results may depend on. rows,
    heads: None for as many as show whether numbers are right."""
    spec = replace(spec, rows=rows or ROWS, heads=min(heads or HEADS, spec.heads))
    return [replace(spec, filling=filling) for filling in bench.OPERATIONS[operation].fillings]


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
    right = within(found.values(), TOLERANCE[spec.dtype])
    return OK if right else WRONG, found, said


def within(errors: Collection[float], allowed: float) -> bool:
    """Whether all errors are less than `allowed`; NaN is not."""
    return all(not math.isnan(error) and error < allowed for error in errors)
