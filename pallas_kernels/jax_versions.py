"""Differences between the versions of JAX that pyproject.toml allows (0.10.2, 0.11.2 and 0.12.0.1
are tested). No other module of the packages asks for a version; each entry says when it can go."""

import functools
import importlib.util
import os
import warnings

import jax
import jaxlib.version
from jax.extend.core import ClosedJaxpr, Jaxpr

# JAX has a simulator of GPUs from 0.11 on. Can go with 0.10: every version then has one.
SIMULATES_GPUS = jax.__version_info__ >= (0, 11)

# What `plgpu.load` takes behind the reference: up to 0.10 the place within it, from 0.11 on the
# place is part of the reference. Can go with 0.10.
PLACE_OF_LOADS = () if SIMULATES_GPUS else ((),)

# From 0.12 on Mosaic GPU refuses stores of registers, as it always did loads, unless it can show
# that they are fast, and has `plgpu.store` for those that need not be. Before that it took every
# `ref[...] = x`. Can go with 0.11.
STORES_ARE_CHECKED = jax.__version_info__ >= (0, 12)

# From 0.11.1 on XLA has the option `xla_gpu_blas_max_algorithms`; it refuses names that it does not
# know. Can go with 0.10.
LIMITS_ALGORITHMS = jaxlib.version.__version_info__ >= (0, 11, 1)

# Up to 0.10 a jaxpr is open or closed, from 0.11 on one class is both. Can go with 0.10.
AnyJaxpr = ClosedJaxpr | Jaxpr

# THE switch of all kernels for Pallas-Triton: a module of JAX, deprecated since 0.11, still there
# in 0.12. Without it the kernels are not offered (`implementations.why_not`) and nothing imports
# it. Can go, with `triton*.py` and their tests, once no version allowed has the module:
# docs/explanation/kernels.md says what runs then.
TRITON = "jax.experimental.pallas.triton"


def has_triton() -> bool:
    """Whether this JAX has Pallas-Triton."""
    return importlib.util.find_spec(TRITON) is not None


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """The jaxpr with equations. Can go with 0.10, as `AnyJaxpr`."""
    return getattr(jaxpr, "jaxpr", jaxpr)


@functools.cache
def name_kernels_alike() -> None:
    """Keeps the running number out of the names that JAX from 0.11.1 to 0.12 gives Mosaic kernels
    for dumps and takes for part of them. With it equal kernels are compiled one by one, and
    programs anew after others than before. Dumps keep it, as the name of a file. Can go with
    0.11."""
    if not (0, 11, 1) <= jax.__version_info__ < (0, 12) or os.environ.get("MOSAIC_GPU_DUMP_TO"):
        return
    from jax.experimental.mosaic.gpu import dialect  # of GPUs: slow to import

    real, name = getattr(dialect, "get_or_set_dump_options", None), "mosaic_gpu.dump_basename"
    if real is None:
        warnings.warn("equal Mosaic kernels are compiled one by one: unknown JAX", stacklevel=2)
        return

    def named(module):
        attributes = module.operation.attributes
        if name not in attributes and "sym_name" in attributes:
            attributes[name] = attributes["sym_name"]  # JAX keeps a name that it finds
        return real(module)

    dialect.get_or_set_dump_options = named
