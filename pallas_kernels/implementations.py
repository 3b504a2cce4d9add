"""Choice of the implementation that runs an operation: names, platforms, dispatch.

Every operation has a plain JAX `reference`, which defines what is correct and runs everywhere. It
may have Pallas kernels for GPU (`mosaic` from Hopper on, `triton`) and TPU (`tpu`). Implementations
are modules with functions of the same names. An operation lists them in a dictionary of functions
that import a module when first called, because JAX may be installed without the other platform's
backend. A kernel runs on its own platform only. Names that end in `-interpret` run it anywhere,
step by step with JAX operations; that is slow, and there to check the kernel.
"""

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels import jax_versions, target

PLATFORMS = {"mosaic": "gpu", "triton": "gpu", "tpu": "tpu"}
# compute capabilities with tensor cores that the Mosaic kernels know: Hopper, Blackwell's B200;
# consumer Blackwell (12.0) has neither
MOSAIC = ("9.0", "10.0")
SUFFIX = "-interpret"
WAY_OUT = "use implementation='reference' (--attention=reference)"
NAMES = ("reference", *PLATFORMS, *(name + SUFFIX for name in PLATFORMS))
Modules = Mapping[str, Callable[[], ModuleType]]


def modules_of(package: str, *kernels: str, **files: str) -> Modules:
    """The implementations of an operation, each imported when first used.

    Args:
      package: the operation's package.
      kernels: names of the kernels that it has; none: all of `PLATFORMS`.
      files: {name: module} for modules that are not called as usual.
    """
    names = ("reference", *(kernels or PLATFORMS))
    usual = {"reference": "reference", "mosaic": "mosaic_gpu", "triton": "triton", "tpu": "tpu"}
    files = usual | files
    return {n: partial(importlib.import_module, f"{package}.{files[n]}") for n in names}


def first_choice(name: str | None, modules: Modules) -> str:
    """The implementation that `run` tries first."""
    if name is None:
        return _choices(modules)[0]
    return name if name.removesuffix(SUFFIX) in modules else "reference"


def run(name: str | None, modules: Modules, function: str, *arguments, **options):
    """Call the implementation `name` of an operation's function.

    None tries the `choices` for the device that is traced for, one after another, and takes the
    first that accepts these arguments. It warns if that is not the first of all. A kernel's
    platform is not checked here, because programs are also compiled for accelerators that are
    absent; `why_not` checks it. An operation without a kernel of that name runs its reference.

    Raises:
      NotImplementedError: the implementation named does not exist or cannot take the arguments.
    """
    if name not in (None, *NAMES):
        raise NotImplementedError(
            f"attention implementation {name!r} does not exist; available: {', '.join(NAMES)}"
        )
    if name is not None:
        kernel = first_choice(name, modules).removesuffix(SUFFIX)
        if kernel != "reference":  # which runs on every platform as it is
            options["interpret"] = name.endswith(SUFFIX)
        if kernel == "mosaic":
            jax_versions.name_kernels_alike()
        return getattr(modules[kernel](), function)(*arguments, **options)
    reasons = []
    for name in _choices(modules):  # the last one is the reference
        try:
            found = run(name, modules, function, *arguments, **options)
        except NotImplementedError as error:
            if name == "reference":
                raise
            reasons.append(str(error))
            continue
        if reasons:  # level 3 is the caller of the operation's API function
            runs = "the plain JAX reference" if name == "reference" else f"the kernel {name}"
            warnings.warn(f"{runs} runs instead: {'; '.join(reasons)}", stacklevel=3)
        return found


def _choices(modules: Modules) -> list[str]:
    """Implementations of an operation for the device that is traced for, the best one first."""
    return [n for n in choices(target.platform(), target.capability()) if n in modules]


def choices(platform: str, capability: str | None) -> tuple[str, ...]:
    """The implementations for "cpu", "gpu" or "tpu", the best one first. capability: the compute
    capability of a GPU, "9.0" for example."""
    kernels = [k for k in PLATFORMS if why_not(k, platform, capability) is None]
    return (*kernels, "reference")


def preferred() -> str:
    """The best implementation for this machine, or for the chip that is traced for."""
    return choices(target.platform(), target.capability())[0]


def why_not(
    name: str, platform: str, capability: str | None, machine: str = "this machine"
) -> str | None:
    """Why an implementation cannot run on a machine with such a platform, or None."""
    wanted, kernel = PLATFORMS.get(name), name.removesuffix(SUFFIX)
    if wanted not in (None, platform):
        return f"{name} needs a {wanted.upper()}, {machine} offers {platform}"
    if name == "mosaic" and capability not in MOSAIC:
        needed = f"a GPU of compute capability {' or '.join(MOSAIC)}"
        return f"{name} needs {needed}, that of {machine} is {capability}"
    if name == "mosaic" + SUFFIX and not jax_versions.SIMULATES_GPUS:
        return f"{name} needs JAX's simulator of GPUs, from 0.11 on, not {jax.__version__}"
    if kernel == "triton" and not jax_versions.has_triton():
        return f"{name} needs Pallas-Triton, which this JAX ({jax.__version__}) does not have"
    return None


def why_not_here(name: str) -> str | None:
    """`why_not` on this machine's default platform."""
    return why_not(name, target.platform(), target.capability())


def step_by_step(name: str) -> str | None:
    """The name by which the kernel `name` runs step by step on this machine, or None."""
    stepwise = name.removesuffix(SUFFIX) + SUFFIX
    return stepwise if stepwise in NAMES and why_not_here(stepwise) is None else None


def require(right: bool, kernel_takes: str) -> None:
    """Raise `NotImplementedError` with a sentence about what a kernel takes, and a way out, unless
    the arrays are right."""
    if not right:
        raise NotImplementedError(f"{kernel_takes}: {WAY_OUT}")


def check_attention(
    name: str, q, kv_pool, kv_scale, head_dims: Sequence, block_sizes: Sequence, dtypes: Sequence
) -> None:
    """Raise `NotImplementedError` with the reason and a way out if the attention kernel `name`
    cannot take these arrays. `head_dims`, `block_sizes` and `dtypes` (names of the pool's types)
    list what it takes."""
    other = f"plan with one of them (policy argument block_size) or {WAY_OUT}"
    for given, wanted, takes, hint in (
        (q.shape[-1], head_dims, "heads of {}", WAY_OUT),
        (kv_pool.shape[2], block_sizes, "blocks of {} slots", other),
        (kv_pool.dtype.name, dtypes, "a pool of {}", WAY_OUT),
    ):
        if given not in wanted:
            takes = takes.format(", ".join(map(str, wanted)))
            raise NotImplementedError(f"{name} attention takes {takes}, not {given}: {hint}")
    # not NotImplementedError, after which the reference would run: it cannot take these either
    if (kv_pool.dtype == jnp.int8) != (kv_scale is not None):
        raise ValueError("an int8 pool comes with kv_scale, and only that")
