"""Calling commands as a user does, but inside the test process (importing JAX anew takes
seconds)."""

import functools
import importlib
import json
import sys

import pytest

from experiments.aot import worker
from experiments.cli import command_line
from pallas_kernels import chips
from tests import models_under_test as models
from tests.experiments import made_up_sweep
from varjax.generation import compiled
from varjax.generation.generator import Generator

# JAX finds the program of an equal generator again: no command has to trace it anew.
traced_once = functools.cache(compiled.flat)


@pytest.fixture
def call(capsys, monkeypatch):
    """call("run", "--flag=..."): (exit status, standard output, standard error) of `python -m
    experiments.run --flag=...`. The cache of compiled programs stays the tests' own, and equal
    programs are traced once: a test that changes what is traced sets `compiled.flat` back."""
    monkeypatch.setattr("varjax.generation.compilation_cache.use", lambda: None)
    monkeypatch.setattr(compiled, "flat", traced_once)

    def invoke(verb, *flags):
        package = importlib.import_module(f"experiments.{verb}")
        is_package = hasattr(package, "__path__")
        name = f"experiments.{verb}.__main__" if is_package else f"experiments.{verb}"
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [f"experiments/{verb}.py", *flags])
        with pytest.raises(SystemExit) as stop:
            command_line.run(module.main)
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return invoke


def report_of(folder, name="report.json") -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def flags_as_text(value) -> str | None:
    """Names of cases that are tuples of flags."""
    return " ".join(value) if isinstance(value, tuple) else None


@pytest.fixture
def refused(call, tmp_path, monkeypatch):
    """refused("run", message, "--flag=..."): status 2, one message with these words in it, nothing
    compiled and nothing written to the current folder, which is empty."""

    def invoke(verb, message, *flags):
        monkeypatch.setattr(Generator, "compile", lambda *a, **k: pytest.fail("compiled"))
        monkeypatch.chdir(tmp_path)
        status, _, err = call(verb, *flags)
        assert status == 2 and message in err and err.count("error:") == 1, err
        assert "Traceback" not in err and not list(tmp_path.iterdir())

    return invoke


@pytest.fixture
def compilers(monkeypatch):
    """All compilers are here, and none is run."""
    monkeypatch.setattr(chips, "why_unavailable", lambda *names: None)
    for name in ("apart", "here"):
        monkeypatch.setattr(worker, name, lambda *a: pytest.fail("a compiler was started"))


@pytest.fixture(scope="session")
def checkpoint():
    """--checkpoint of a small VAR."""
    return f"--checkpoint={models.checkpoint_folder('b_k6_sharedaln')}"


@pytest.fixture
def sweep(tmp_path):
    """A finished sweep, made up."""
    folder = tmp_path / "sweep"
    made_up_sweep.write_sweep(folder)
    return folder
