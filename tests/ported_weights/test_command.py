"""`python -m ported_weights` as users call it."""

import sys
from pathlib import Path

import pytest

from varjax.models import registry
from varjax.storage import manifest


def _run(capsys, monkeypatch, *arguments):
    """(exit status, standard output, standard error) of the command, in this process."""
    from experiments.cli import command_line
    from ported_weights import __main__ as command  # defines flags, so only when needed

    monkeypatch.setattr(sys, "argv", ["ported_weights", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command_line.run(command.main)
    output = capsys.readouterr()
    return stopped.value.code or 0, output.out, output.err


def _flags(request):
    names = ("model", "source", "tokenizer_source", "config", "tokenizer_config", "out")
    return [f"--{name}={request[name]}" for name in names]


def test_conversion(capsys, monkeypatch, request_for):
    request = request_for("c_k5_nol2norm")
    status, out, err = _run(capsys, monkeypatch, *_flags(request), "--dtype=bfloat16")
    assert status == 0 and "385,755 parameters written" in out and "tensors" in err
    assert manifest.read_manifest(Path(request["out"]), registry.FAMILIES)["dtype"] == "bfloat16"
    status, out, err = _run(capsys, monkeypatch, *_flags(request))
    assert status == 2 and "exists already" in err and not out
