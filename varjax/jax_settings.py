"""The global settings of JAX that change numbers. Pictures do not depend on them.

While varjax traces, compiles and draws, those of `PINNED` have the values named here, whatever the
process or its environment (`JAX_ENABLE_X64` and others) says; afterwards they are as before.
Others cannot be set for a while: they are refused. What is left are options of the compiler, which
may round otherwise: `of_compiler` names them, for reports and for what a run goes on with.
"""

import contextlib
import os
from collections.abc import Iterator

import jax

from varjax.core.errors import UserError

PINNED = {
    "enable_x64": False,
    "default_prng_impl": "threefry2x32",
    "threefry_partitionable": True,
    "default_matmul_precision": None,
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "transfer_guard": "allow",
}
REFUSED = {
    "jax_random_seed_offset": "a seed would stand for other pictures",
    "jax_disable_jit": "programs are compiled before they run",
}
COMPILER = {  # options of the compiler, with what JAX has by itself
    "jax_allow_f16_reductions": True,
    "jax_disable_most_optimizations": False,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_optimization_level": "UNKNOWN",
}
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
HARMLESS = ("--xla_force_host_platform_device_count", "--xla_dump")


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Holds `PINNED` in this thread. `UserError` for a setting of `REFUSED`."""
    for name, why in REFUSED.items():
        if value := jax.config.values.get(name):
            raise UserError(f"{name.upper()}={value}: {why}: unset it")
    with contextlib.ExitStack() as held:
        for name, value in PINNED.items():
            held.enter_context(getattr(jax, name)(value))
        yield


def of_compiler() -> dict[str, object]:
    """Options of the compiler that are not JAX's own and may change a last digit, by name."""
    found = {}
    for name, usual in COMPILER.items():
        value = jax.config.values.get(name)  # None: this JAX has no such option
        value = getattr(value, "name", value)
        found |= {} if value in (usual, None) else {name: value}
    for name in FLAGS:
        given = [f for f in os.environ.get(name, "").split() if not f.startswith(HARMLESS)]
        found |= {name: " ".join(given)} if given else {}
    return found
