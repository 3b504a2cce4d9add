"""The GPU kernels compile for GPUs that are not here, and keep their numbers in registers.

By default the types and head sizes that matter most, with --slow everything that is offered. Each
target is compiled in a process of its own: some compiler errors end the process.
"""

import json
import subprocess
import sys

import jax
import pytest

from pallas_kernels import chips
from tests.pallas_kernels import compile_triton

TARGETS = [("h200", "few")]
TARGETS += [pytest.param(t, "all", marks=pytest.mark.slow) for t in ("h200", "a100")]
TARGETS += [pytest.param(t, "few", marks=pytest.mark.slow) for t in ("l4", "h100", "b200")]


@pytest.mark.aot
@pytest.mark.parametrize(("target", "cases"), TARGETS)
def test_kernels_compile(target, cases):
    if why := chips.why_unavailable(target):
        pytest.skip(why)
    command = [sys.executable, compile_triton.__file__, target, cases]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    chosen = [kernel for kernel in found if kernel["operation"] == "sample"]
    rows = compile_triton.FEW_ROWS if cases == "few" else compile_triton.ALL_ROWS
    assert len(chosen) == len(rows)
    others = len(compile_triton.OPERATIONS) * len(compile_triton.specs(cases))
    assert len(found) == len(rows) + others
    if jax.__version_info__ >= (0, 11):
        pytest.skip("all compile; this JAX does not show what kernels became")
    assert not any(kernel["spills"] for kernel in chosen), chosen
    found = [kernel for kernel in found if kernel not in chosen]
    for kernel in found:
        assert kernel["shared_memory"] < chips.get_chip(target).gpu.shared_memory[1]
        if kernel["operation"] != "write":
            assert kernel["asynchronous"], kernel  # keys are on the way while others are used
        if kernel["dtype"] == "bfloat16" and kernel["operation"] != "write":
            assert kernel["tensor_cores"], kernel
        assert not kernel["spills"], kernel
