"""JAX's simulator of TPUs as the tests here use it: a copy is carried out as late as it may be,
fresh memory is full of NaN, races are looked for, the grid is divided over cores.

The plain interpreter (`interpret=True`) carries a copy out at its start and cannot see that a wait
is missing.
"""

from functools import partial

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import tpu as pltpu

# By default two, where what one leaves for the other counts; that one core has all steps to itself
# is also what mistakes are tried with.
CORES = [pytest.param(1, marks=pytest.mark.slow), 2]


def simulated(operation, cores: int = 1, bounds: str = "logical", stops: bool = True, **options):
    """`operation` of a TPU module, in the simulator; `bounds`: where a buffer ends, as
    `pltpu.InterpretParams` has it. stops: whether a race may stop the program, as JAX does from
    0.12 on; else `has_races` tells, as before."""
    goes_on = {} if stops or jax.__version_info__ < (0, 12) else {"on_race": "warn"}
    params = pltpu.InterpretParams(
        dma_execution_mode="on_wait",
        uninitialized_memory="nan",
        detect_races=True,
        buffer_bounds=bounds,
        num_cores_or_threads=cores,
        **goes_on,
    )
    return partial(operation, interpret=params, **options)


def has_races() -> bool:
    """Whether the last program raced."""
    return simulator.races.races_found
