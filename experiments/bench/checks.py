"""Comparing a kernel with the reference: one case, its verdict, and the command that repeats it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallas_kernels import bench
from pallas_kernels.arg_specs import ArgSpec

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # relative Frobenius error
ROWS, HEADS, BLOCK_SIZE = 2, 3, 16  # of a case, where nothing else is asked for
SMALL_TOKENS = 64
OK, WRONG, REFUSED = "ok", "WRONG", "REFUSED"


def resized(
    spec: ArgSpec, small: bool, block_size: int = BLOCK_SIZE, rows: int | None = None
) -> ArgSpec:
    """A published shape with its slots in blocks of `block_size`, and with `rows`. small: cut down
    to what interpreters and CPUs take."""
    if small:
        spec = spec.reduced(tokens=min(SMALL_TOKENS, spec.tokens))
        spec = replace(spec, length=min(spec.length, spec.tokens))
    entries = -(-spec.entries * spec.block_size // block_size)
    return replace(spec, entries=entries, block_size=block_size, rows=rows or spec.rows)


@dataclass(frozen=True)
class Case:
    """One comparison.

    spec: the call, with its types and the filling of its tables.
    small: whether `resized` has cut the published shape down.
    """

    operation: str
    spec: ArgSpec
    implementation: str
    small: bool = False

    @property
    def words(self) -> str:
        """The call in a line."""
        s = self.spec
        return (
            f"{self.operation} by {self.implementation}, shape {s.name} ({s.rows} rows, {s.heads} "
            f"heads of {s.head_dim}, {s.length} of {s.tokens} tokens, {s.entries} blocks of "
            f"{s.block_size}), {s.dtype}, pool {s.pool_dtype.name}, tables {s.filling}"
        )

    @property
    def command(self) -> str:
        """The command that compares this case alone."""
        s = self.spec
        flags = {"op": self.operation, "shape": s.name, "size": "small" if self.small else "full"}
        flags |= {"dtype": s.dtype, "kv_dtype": s.pool_dtype.name, "filling": s.filling}
        flags |= {"rows": s.rows, "heads": s.heads, "block_size": s.block_size}
        flags["implementation"] = self.implementation
        said = " ".join(f"--{name}={value}" for name, value in flags.items())
        return f"python -m experiments.bench --check {said}"

    @property
    def allowed(self) -> float:
        """Errors are less than this."""
        return TOLERANCE[self.spec.dtype]

    def compare(self) -> tuple[str, dict, str]:
        """(verdict, errors by result, the same or the kernel's reason in words)."""
        try:
            found = bench.errors(self.operation, self.spec, self.implementation)
        except NotImplementedError as error:  # it does not take this shape
            return REFUSED, {"refused": str(error)}, str(error)
        said = "  ".join(f"{part} {error:.1e}" for part, error in found.items())
        return OK if within(found.values(), self.allowed) else WRONG, found, said


def within(errors: Sequence[float], allowed: float) -> bool:
    """Whether all errors are less than `allowed`; NaN is not."""
    return all(not math.isnan(error) and error < allowed for error in errors)


def case(
    operation: str,
    spec: ArgSpec,
    implementation: str,
    *,
    filling: str,
    rows: int | None = None,
    heads: int | None = None,
    small: bool = False,
) -> Case:
    """The comparison of a shape. rows, heads: None for as many as show whether numbers are
    right."""
    heads = min(heads or HEADS, spec.heads)
    spec = replace(spec, rows=rows or ROWS, heads=heads, filling=filling)
    return Case(operation, spec, implementation, small)
