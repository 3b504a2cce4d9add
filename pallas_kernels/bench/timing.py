"""Timings of functions on the device that is there.

A candidate is a function that runs an operation once and returns what its next run takes. So runs
follow each other on the device without the host between them. `measure` times a loop of runs and
takes the median of several loops. Arguments that a loop does not change are made to depend on its
carry (`never`, `after`); else the compiler would run the operation once, before the loop.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import implementations
from pallas_kernels.arg_specs import FILLINGS, ArgSpec

AIM = 0.02  # seconds of a timed loop
MOST_RUNS = 200


@dataclass(frozen=True)
class Candidate:
    """One way to do an operation. step: traced, (carry, *arguments) -> next carry."""

    step: Callable
    carry: jax.Array | tuple
    arguments: tuple


@dataclass(frozen=True)
class Operation:
    """Measurement of an operation, for shapes (`ArgSpec`) whose heads own all of their table.

    modules: implementations by name.
    candidate: (shape, implementation) -> what is timed.
    errors: (shape, implementation) -> relative error of each result against the reference in
      float32.
    models: beginnings of the names of shapes that the operation is for.
    of_cache: whether its time depends on how much heads own.
    fillings: fillings of tables (`arg_specs.FILLINGS`) that results may depend on.
    """

    modules: implementations.Modules
    candidate: Callable[[ArgSpec, str], Candidate]
    errors: Callable[[ArgSpec, str], Mapping[str, float]]
    models: tuple[str, ...] = ("",)
    of_cache: bool = True
    fillings: tuple[str, ...] = FILLINGS[:1]

    def has(self, name: str) -> bool:
        """Whether the operation has an implementation of that name."""
        return name.removesuffix(implementations.SUFFIX) in self.modules


def never(carry: jax.Array) -> jax.Array:
    """int32, always 0 (also for NaN), which the compiler takes for a result of the carry."""
    return (carry.reshape(-1)[0] > jnp.inf).astype(jnp.int32)


def after(carry: jax.Array, arrays):
    """The same arrays, which the compiler takes to be known only once `carry` is."""
    return jax.lax.optimization_barrier((arrays, never(carry)))[0]


def repeated(
    run: Callable, *arguments, depending: Callable = lambda carry, array: array + never(carry)
) -> Candidate:
    """Runs of a function of arrays that none of them changes. depending: (carry, first argument) ->
    the same as a result of the carry."""
    found = jax.eval_shape(run, *arguments)
    return Candidate(
        lambda carry, first, *rest: run(depending(carry, first), *rest),
        jnp.zeros(found.shape, found.dtype),
        arguments,
    )


def measure(candidate: Candidate, repeats: int) -> float:
    """Seconds per run: the median over `repeats` timed loops, after compiling and warming up."""
    loop = jax.jit(
        lambda runs, carry, arguments: jax.lax.fori_loop(
            0, runs, lambda i, c: candidate.step(c, *arguments), carry
        )
    )

    def seconds(runs: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(runs, candidate.carry, candidate.arguments))
        return time.perf_counter() - start

    seconds(1)  # compiles, and only now: the number of runs is an argument
    runs = int(np.clip(AIM / max(seconds(1), 1e-6), 1, MOST_RUNS))
    seconds(runs)
    return statistics.median(seconds(runs) for _ in range(repeats)) / runs


def relative(names, found, expected) -> dict[str, float]:
    """Frobenius norms of differences, relative to those of the expected arrays."""
    errors = {}
    for name, *pair in zip(names, found, expected, strict=True):
        a, b = (np.asarray(x, np.float64) for x in pair)
        errors[name] = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))
    return errors


def unequal(name: str, found, expected) -> dict[str, float]:
    """1 if arrays that have to be equal bit by bit differ anywhere, else 0."""
    a, b = (np.asarray(x) for x in (found, expected))
    same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return {name: float(not same)}


def short(error: Exception, length: int = 100) -> str:
    """An error in one line: its kind, and the first `length` characters of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:length]}"
