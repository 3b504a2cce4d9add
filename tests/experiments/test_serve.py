"""Flags of `python -m experiments.serve`: what is wrong with them is said before it serves. The
server itself: tests/serve."""

import importlib
import sys
import types

import pytest

for module in ("fastapi", "uvicorn", "python_multipart", "prometheus_client"):
    pytest.importorskip(module, reason="needs the extra serve")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port=70000",), "--port"),
        (("--host=no.such.host.invalid",), "choose another address"),
        (("--queue=0",), "--queue"),
        (("--max_batch=0",), "--max_batch"),
        (("--kv_bytes=lots",), "is no number of bytes: write 2GiB"),
        (("--kv_bytes=1KiB",), "hold no image"),
        (("--policy=nothing",), "headkv"),
        (("--policy=headkv", "--budget=7"), "budget"),
        (("--cfg=-1",), "cfg"),
        (("--api_key=missing.txt",), "No such file"),
        (("--seed=3",), "unknown flag --seed"),
        (("--batch_size=3",), "unknown flag --batch_size"),
        (("--checkpoint=missing",), "missing"),
        (("--policies=full,nothing",), "--policies"),
        (("--policies=table",), "--policies"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_refused(refused, flags, message):
    refused("serve", message, "--port=0", *flags)


def test_keys_that_cannot_be_sent(refused, tmp_path_factory):
    for content in (b"", b"\n", "schlüssel".encode(), b"\xff\n", b"a" * 5000):
        path = tmp_path_factory.mktemp("key") / "key.txt"
        path.write_bytes(content)
        refused("serve", "", "--port=0", f"--api_key={path}")


def test_a_server_that_still_compiles_holds_its_port(refused, monkeypatch):
    """A socket that is only bound would let another server bind it, too, and fail after minutes."""
    server = importlib.import_module("experiments.serve.__main__")
    for name, value in (("HOST", "127.0.0.1"), ("PORT", 0)):
        monkeypatch.setattr(server, name, types.SimpleNamespace(value=value))
    with server.bound_socket() as first:
        monkeypatch.undo()
        monkeypatch.setattr(server, "make_service", lambda: pytest.fail("it went on"))
        port = first.getsockname()[1]
        refused("serve", "choose another address or port", f"--port={port}")


def test_a_missing_extra(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused("serve", "pip install -e '.[serve]'", "--port=0")
