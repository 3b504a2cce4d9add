"""The text of `--version`: versions of everything that results may depend on, and the device.

A GPU or TPU is not asked, since that would start it.
"""

import importlib.metadata
import importlib.util
import platform

import jax

import varjax

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def text() -> str:
    """Return one line per package: name and version."""
    found = {"varjax": varjax.__version__}
    found |= {name: importlib.metadata.version(name) for name in PACKAGES}
    found |= {"Python": platform.python_version(), "device": _device()}
    width = max(map(len, found))
    return "\n".join(f"{name.ljust(width)}  {version}" for name, version in found.items())


def _device() -> str:
    """Name the device. A GPU or TPU is not asked: starting it takes seconds and most memory."""
    if _platforms() == "cpu" or not _accelerators():
        return "cpu"
    return f"not started ({_platforms() or 'GPU or TPU'})"


def _platforms() -> str | None:
    """Return what JAX was told to run on, as in JAX_PLATFORMS."""
    return jax.config.jax_platforms


def _accelerators() -> bool:
    """Whether JAX's plugins for GPUs or TPUs are installed."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
