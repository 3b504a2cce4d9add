"""What the installed JAX deprecates has no place, and a JAX without Pallas-Triton is enough."""

import ast
import importlib
import importlib.metadata
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pallas_kernels import jax_versions

ROOT = Path(__file__).parents[2]
PACKAGES = ("varjax", "pallas_kernels", "ported_weights", "experiments")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
PALLAS = "jax.experimental.pallas"


def imported(tree: ast.AST) -> dict[str, str]:
    """{name in the file: full name} of what a file imports."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                a.asname or a.name: a.name for a in node.names if a.asname or "." not in a.name
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def used(source: str) -> set[str]:
    """Full names that a file takes from JAX's modules."""
    tree = ast.parse(source)
    names = imported(tree)
    attributes = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    found = set(names.values())
    for node in attributes:
        words = ast.unparse(node).split(".")
        if words[0] in names:
            found.add(".".join([names[words[0]], *words[1:]]))
    return {name for name in found if name.startswith("jax.")}


def deprecated(names: set[str]) -> list[str]:
    """Which of these full names the installed JAX deprecates."""
    found = []
    for name in sorted(names):
        module, _, last = name.rpartition(".")
        try:
            about = vars(importlib.import_module(module)).get("_deprecations", {})
        except ImportError:
            continue  # the module is an attribute itself, or belongs to another version
        if last in about:
            found.append(name)
    return found


def test_nothing_deprecated_is_used():
    names = set().union(*(used(file.read_text(encoding="utf-8")) for file in FILES))
    assert f"{PALLAS}.kernel" in names and len(names) > 100, "files are not read as they should be"
    assert not deprecated(names)


@pytest.mark.slow
def test_without_pallas_triton():
    """A JAX that has none of it: everything else imports, and old GPUs run the reference."""
    program = f"""
        import sys

        sys.modules[{jax_versions.TRITON!r}] = None  # as if it were not there
        import importlib, pkgutil
        import pallas_kernels, varjax
        from pallas_kernels import implementations, jax_versions

        for package in (pallas_kernels, varjax):
            for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if not found.name.rpartition(".")[2].startswith("triton"):
                    importlib.import_module(found.name)
        assert not jax_versions.has_triton()
        assert implementations.choices("gpu", "8.0") == ("reference",)
        assert implementations.choices("gpu", "9.0") == ("mosaic", "reference")
        print(implementations.why_not("triton", "gpu", "8.0"))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "triton needs Pallas-Triton, which this JAX" in done.stdout
