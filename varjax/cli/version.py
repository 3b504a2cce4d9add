"""The text of `--version`: versions of everything that results may depend on, and the device.

A GPU or TPU is not asked: starting it takes seconds and most memory.
"""

import importlib.metadata
import importlib.util
import platform

import jax

import varjax

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def text() -> str:
    """Return one line per package: name and version."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    there = plugins or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    told = jax.config.jax_platforms
    device = "cpu" if told == "cpu" or not there else f"not started ({told or 'GPU or TPU'})"
    found = {"varjax": varjax.__version__}
    found |= {name: importlib.metadata.version(name) for name in PACKAGES}
    found |= {"Python": platform.python_version(), "device": device}
    width = max(map(len, found))
    return "\n".join(f"{name.ljust(width)}  {version}" for name, version in found.items())
