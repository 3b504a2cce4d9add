"""Which implementation of an operation runs: names, platforms, dispatch.

Every operation has a plain JAX `reference`, which defines what is correct and runs everywhere, and
Pallas kernels for GPU (`triton`) and TPU (`tpu`). A kernel runs on its own platform only; the names
that end in `-interpret` run it step by step with JAX operations anywhere, slowly, to check it.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType

import jax

PLATFORMS = {"triton": "gpu", "tpu": "tpu"}
SUFFIX = "-interpret"
NAMES = ("reference", *PLATFORMS, *(name + SUFFIX for name in PLATFORMS))


@dataclass(frozen=True)
class Implementation:
    """name: "reference", "triton" or "tpu"; interpret: run the kernel without its platform."""

    name: str
    interpret: bool = False

    def module(self, operation: str) -> ModuleType:
        """The file of the kernel in the folder of an operation; imported only when it is used."""
        return importlib.import_module(f"{operation}.{self.name}")


def select(name: str | None) -> Implementation:
    """The implementation called `name`; None is the kernel of the default platform, or the
    reference on a CPU.

    A kernel's platform is not checked here, because programs are also compiled for accelerators
    that are not there; see `why_not_here`.
    """
    name = name or preferred(jax.default_backend())
    if name not in NAMES:
        raise NotImplementedError(
            f"attention implementation {name!r} does not exist; available: {', '.join(NAMES)}"
        )
    return Implementation(name.removesuffix(SUFFIX), name.endswith(SUFFIX))


def preferred(platform: str) -> str:
    """The implementation for "cpu", "gpu" or "tpu"."""
    return {p: name for name, p in PLATFORMS.items()}.get(platform, "reference")


def why_not_here(name: str) -> str | None:
    """Why an implementation cannot run on this machine's default platform, or None."""
    wanted, found = PLATFORMS.get(name), jax.default_backend()
    if wanted is None or wanted == found:
        return None
    return f"{name} needs a {wanted.upper()}, this machine offers {found}"
