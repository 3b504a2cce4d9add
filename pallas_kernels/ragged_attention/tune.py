"""Finding the fastest tiles of the attention kernels on the device that is there."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import bench
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.implementations import SUFFIX
from pallas_kernels.ragged_attention import api, config

OPERATIONS = config.OPERATIONS
CHOICES = {
    "mosaic": {"warpgroups": (1, 2, 3), "block_k": (64, 128), "buffers": (2, 3, 4)},
    "triton": {
        "block_q": (16, 32, 64, 128),
        "block_k": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
    "tpu": {
        "block_q": (128, 256, 512, 1024),
        "copy_keys": (128, 256, 512),
        "own_keys": (128, 256, 512),
    },
}


def tiles(call: config.Call, implementation: str) -> list[config.Config]:
    """The heuristic's tiles, then all other tiles that make sense for the call."""
    choices, kind = CHOICES[implementation], config.KINDS[implementation]
    # larger tiles than the queries fill would only add padding
    size, each = ("warpgroups", 64) if implementation == "mosaic" else ("block_q", 1)
    most = max(each * choices[size][0], pl.next_power_of_2(call.queries))
    grid = (
        dict(zip(choices, sizes, strict=True)) for sizes in itertools.product(*choices.values())
    )
    every = [kind(**sizes) for sizes in grid if each * sizes[size] <= most]
    first = config.heuristic(call, implementation)
    return [first, *(tile for tile in every if tile != first)]


def call_of(operation: str, spec: ArgSpec) -> config.Call:
    """The call that a shape stands for."""
    args = spec.abstract()
    return config.Call.of(operation, args.projection, args.kv_pool, args.table)


def trials(
    operation: str, spec: ArgSpec, implementation: str, repeats: int
) -> Iterator[tuple[config.Config, float, str]]:
    """(tiles, seconds, why they failed) one after another. Seconds are infinite for tiles that the
    compiler refuses or that give wrong results. Results are compared with the reference or, where
    that does not fit, with those of the first tiles.

    implementation: a key of `CHOICES`, or its interpreter, whose times mean nothing."""
    # full tables: what tiles cost shows where there is most to do
    args = replace(spec, filling="full").arguments(poison=False)
    name = implementation.removesuffix(SUFFIX)
    kernel, expected = getattr(api.MODULES[name](), operation), None
    # out of memory: its scores of all rows may be larger than the device
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        expected = _once(bench.candidate(operation, args, "reference"), operation, spec.length)
    for tile in tiles(call_of(operation, spec), name):
        run = partial(_run, kernel, operation, tile, interpret=name != implementation)
        try:
            candidate = bench.candidate(operation, args, implementation, run)
            result = _once(candidate, operation, spec.length)
            seconds = bench.measure(candidate, repeats)
        except Exception as error:  # compilers have many ways to refuse tiles
            yield tile, math.inf, bench.short(error, 120)
            continue
        expected = result if expected is None else expected
        scale = max(float(np.linalg.norm(expected)), 1e-30)
        wrong = not float(np.linalg.norm(result - expected)) / scale <= 1e-2  # NaN is wrong too
        yield tile, math.inf if wrong else seconds, "wrong result" if wrong else ""


def _once(candidate: bench.Candidate, operation: str, length: int) -> np.ndarray:
    """The result of one run outside the timed loop: the output of attention for the real queries,
    or the moments of all keys."""
    result = jax.jit(candidate.step)(candidate.carry, *candidate.arguments)
    result = result[:, :length] if operation == "attend" else result
    return np.asarray(result, np.float32)


def _run(kernel, operation: str, tile, *args, kv_scale, interpret: bool):
    if operation == "attention_moments":
        return kernel(*args, kv_scale, interpret=interpret, config=tile)
    return kernel(*args, kv_scale, return_lse=False, interpret=interpret, config=tile)


def keep(kind: str, operation: str, implementation: str, found: dict) -> str:
    """Add the best tiles of calls to the tuned file of a device kind. Returns its path."""
    found = {call.bucket(): tile for call, tile in found.items()}
    found = config.tuned(kind, operation, implementation) | found
    return str(config.write_tuned(kind, operation, implementation, found))
