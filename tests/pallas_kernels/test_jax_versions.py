"""A JAX without Pallas-Triton is enough."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pallas_kernels import jax_versions

ROOT = Path(__file__).parents[2]


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
