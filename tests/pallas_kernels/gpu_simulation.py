"""JAX's simulator of GPUs (from 0.11 on) as the tests here use it: fresh memory is full of NaN,
copies may reach beyond an array's end as on the chip, races are looked for."""

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import jax_versions

needed = pytest.mark.skipif(
    not jax_versions.SIMULATES_GPUS, reason="JAX simulates GPUs from 0.11 on"
)
# How a test of a mistake sees a race: as an error of the simulator, which stops there from 0.12 on,
# or as what the simulator prints while it goes on (0.11), through `assert no_races(...), "race"`.
RACE = "RACE DETECTED|^race"
# How it sees a barrier that nobody waited for, or that was waited for too late; whichever is first.
UNWAITED = f"no threads observed phase|participates in the barrier must do so in all|{RACE}"


def params():
    return plgpu.InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized")


def no_races(captured) -> bool:
    """Whether no kernel has raced since the last call. captured: `capsys`. From 0.12 on a race has
    stopped the program before anybody asks. (Not what the simulator remembers: that is about the
    last kernel of a program alone.)"""
    return "RACE DETECTED" not in captured.readouterr().out
