"""Quick compilation for tests on a CPU, since most of the time is compilation.

Flags of XLA for code that is soon made. The sampler of a small model and its decoder: 1.9 seconds
of processor time in XLA, of 4.5 without the first three of them (jaxlib 0.10.2).

And one MLIR context for many programs. jax makes one for each, which loads every dialect: 5 of the
20 milliseconds that a program of one operation takes, and 1.2 MiB that stay as long as the program.

And none for `jnp.asarray` of a NumPy array: jax compiles one for each shape that returns what it is
given.
"""

import functools
import platform
from importlib import metadata

import numpy as np


def quick_flags() -> list[str]:
    flags = [
        "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling,xla_cpu_optimize_for_size",
        "--xla_cpu_parallel_codegen_split_count=1",  # parts are for cores that are idle
    ]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("--xla_cpu_max_isa=AVX")  # few instructions to choose from
    if metadata.version("jaxlib").startswith("0.10."):  # later ones do not know this flag
        flags.append("--xla_cpu_use_fusion_emitters=false")  # 4 seconds become 3
    return flags


class ContextOfPrograms:
    """What `jax` lowers a program in: the same MLIR context for `PROGRAMS` of them, since it keeps
    all of their types and constants."""

    PROGRAMS = 100

    def __init__(self, make):
        self.make, self.used, self.context = make, self.PROGRAMS, None

    def __call__(self):
        if self.used == self.PROGRAMS:
            self.context, self.used = self.make(), 0
        self.used += 1
        return self.context


def share_contexts() -> None:
    """Let jax lower programs that bring no context of their own in a shared one. These are parts of
    jax that may change: without them tests are slower, no more."""
    from jax._src.interpreters import mlir  # the flags above are set before jax is imported

    if not (hasattr(mlir, "make_ir_context") and hasattr(mlir, "ModuleContext")):
        return
    shared, init = ContextOfPrograms(mlir.make_ir_context), mlir.ModuleContext.__init__

    @functools.wraps(init)
    def with_context(self, *args, context=None, **options):
        init(self, *args, context=context or shared(), **options)

    mlir.ModuleContext.__init__ = with_context


def copy_host_arrays() -> None:
    """Let `jnp.asarray` copy a NumPy array to the device without a program; parts of jax as well
    that may change."""
    import jax
    from jax._src import core

    stage = getattr(core, "stage_p", None)
    if not hasattr(stage, "impl"):
        return
    compiled = stage.impl

    def copied(x):
        plain = isinstance(x, np.ndarray) and not getattr(x, "weak_type", False)
        return jax.device_put(np.array(x)) if plain else compiled(x)

    stage.def_impl(copied)
