"""Connections that send nothing, or half of it: they are closed, and leave room for others."""

import socket
import time

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from experiments.serve import server  # noqa: E402
from tests.serve.server import assert_form, head, raw  # noqa: E402


def connect(address):
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def closed(connection, seconds):
    connection.settimeout(seconds)
    try:
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_half_sent_heads_are_closed(address, monkeypatch):
    """At the first request of a connection, and at a later one; with a trickle of bytes, too."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 1)
    silent, half, later = connect(address), connect(address), connect(address)
    half.sendall(b"GET / HTTP/1.1\r\nHost: 127.")
    later.sendall(head("GET", "/healthz"))
    while b'"ok"}' not in later.recv(1000):
        pass
    for _ in range(3):
        time.sleep(0.25)
        later.sendall(b"G")
        half.sendall(b"0")
    for connection in (silent, half, later):
        assert closed(connection, 5)
        connection.close()


def test_one_address_holds_a_part_of_all_connections(address, monkeypatch):
    monkeypatch.setattr(server.Connection, "most", 20)
    open_ones = [connect(address) for _ in range(10)]
    time.sleep(0.2)
    found = raw(address, head("GET", "/healthz"))
    assert_form(found, 503)
    for connection in open_ones:
        connection.close()
    end = time.monotonic() + 10
    while raw(address, head("GET", "/healthz"))[0] != 200:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_connections_fit_the_descriptors(monkeypatch):
    monkeypatch.setattr(server.Connection, "most", server.Connection.most)
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (200, 200))
    server.Connection.fit_descriptors()
    assert server.Connection.most == 200 - server.SPARE
