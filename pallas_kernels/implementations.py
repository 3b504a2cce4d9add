"""Which implementation of an operation runs: names, platforms, dispatch.

Every operation has a plain JAX `reference`, which defines what is correct and runs everywhere, and
Pallas kernels for GPU (`triton`) and TPU (`tpu`). A kernel runs on its own platform only; the names
that end in `-interpret` run it step by step with JAX operations anywhere, slowly, to check it.
"""

import warnings
from collections.abc import Callable, Mapping

import jax

PLATFORMS = {"triton": "gpu", "tpu": "tpu"}
SUFFIX = "-interpret"
NAMES = ("reference", *PLATFORMS, *(name + SUFFIX for name in PLATFORMS))

# Of one operation: for "reference", "triton" and "tpu" a function that returns the implementation,
# so that a kernel's module is imported only where the kernel runs.
Kernels = Mapping[str, Callable[[], Callable]]


def run(name: str | None, kernels: Kernels, *arguments, **options):
    """Call the implementation `name` of an operation.

    None takes the kernel of the default platform, and the reference where there is none or, with a
    warning, where it cannot take these arguments. A kernel's platform is not checked, because
    programs are also compiled for accelerators that are not there; see `why_not_here`.

    Raises:
      NotImplementedError: the implementation named does not exist or cannot take the arguments.
    """
    if name is None:
        try:
            name = preferred(jax.default_backend())
            return run(name, kernels, *arguments, **options)
        except NotImplementedError as error:
            # level 3 is the caller of the operation's API function
            warnings.warn(f"the plain JAX reference runs instead: {error}", stacklevel=3)
            return run("reference", kernels, *arguments, **options)
    if name not in NAMES:
        raise NotImplementedError(
            f"attention implementation {name!r} does not exist; available: {', '.join(NAMES)}"
        )
    kernel = name.removesuffix(SUFFIX)
    if kernel != "reference":
        options["interpret"] = name.endswith(SUFFIX)
    return kernels[kernel]()(*arguments, **options)


def preferred(platform: str) -> str:
    """The implementation for "cpu", "gpu" or "tpu"."""
    return {p: name for name, p in PLATFORMS.items()}.get(platform, "reference")


def why_not_here(name: str) -> str | None:
    """Why an implementation cannot run on this machine's default platform, or None."""
    wanted, found = PLATFORMS.get(name), jax.default_backend()
    if wanted is None or wanted == found:
        return None
    return f"{name} needs a {wanted.upper()}, this machine offers {found}"
