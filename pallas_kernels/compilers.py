"""Compilers of chips that are not here: Python packages, and those that are missing."""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

CUDA_PLUGIN = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
CUDA_COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-crt")


def why_unavailable(platforms: Mapping[str, str]) -> str | None:
    """What is missing to compile, with the commands that make an environment for it: beside JAX's
    CUDA plugin every other command would look for a GPU. platforms: of chips, by name."""
    found: dict[str, list[str]] = {}
    for chip, platform in platforms.items():
        if reasons := _lacking(platform)[0]:
            found.setdefault(", ".join(reasons), []).append(chip)
    if not found:
        return None
    each = "; ".join(f"{', '.join(chips)}: {why}" for why, chips in found.items())
    return (
        f"{each}: run `make aot-venv` in the folder of varjax, then .venv-aot/bin/python in place "
        "of python; or, in another environment that only compiles, run "
        f"`pip install --no-deps {shlex.join(missing_packages(*platforms.values()))}`"
    )


def missing_packages(*platforms: str) -> list[str]:
    """The packages that are missing to compile for "gpu" or "tpu", as pip takes them."""
    return list(dict.fromkeys(name for p in platforms for name in _lacking(p)[1]))


def _lacking(platform: str) -> tuple[list[str], list[str]]:
    """(what is missing, in words; the packages, as pip takes them)."""
    return _lacking_for_tpu() if platform == "tpu" else _lacking_for_gpu()


def _lacking_for_tpu() -> tuple[list[str], list[str]]:
    if _version("libtpu"):
        return [], []
    wanted = importlib.metadata.requires("jax") or ()  # says which libtpu belongs to it
    pinned = (re.match(r"libtpu[^;\s]*", line) for line in wanted)
    return ["libtpu is not installed"], [next((m[0] for m in pinned if m), "libtpu")]


def _lacking_for_gpu() -> tuple[list[str], list[str]]:
    reasons, packages = [], []
    wanted, found = _version("jaxlib"), [_version(name) for name in CUDA_PLUGIN]
    if found != [wanted, wanted]:
        here = " and ".join(sorted(set(filter(None, found))))
        mismatch = f"JAX's CUDA plugin is {here}, jaxlib {wanted}"
        reasons.append("JAX's CUDA plugin is not installed" if None in found else mismatch)
        packages += [f"{name}=={wanted}" for name in CUDA_PLUGIN]
    if not _has_ptxas():
        reasons.append("ptxas is not here (nor a CUDA toolkit)")
        packages += CUDA_COMPILER
    return reasons, packages


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_ptxas() -> bool:
    """Whether XLA finds ptxas: on the path, in a CUDA toolkit, or in NVIDIA's Python package."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = [file for root in roots for file in root.glob("*/bin/ptxas")]
    found.append(Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "ptxas")
    return shutil.which("ptxas") is not None or any(file.exists() for file in found)
