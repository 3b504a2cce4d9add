"""A server under load: 1,000 requests of 32 clients beside 300 idle connections, killed clients,
SIGTERM."""

import base64
import contextlib
import http.client
import io
import json
import socket
import threading
import time

import numpy as np
import pytest
from PIL import Image

from tests.serve.process import Process, process

httpx = pytest.importorskip("httpx", reason="needs httpx, of the extra dev")
pytestmark = pytest.mark.slow
REQUESTS, CLIENTS, CLASSES, IDLE = 1000, 32, 44, 300
JSON = {"Content-Type": "application/json"}


class Load:
    """Requests of several clients at once. pictures: {number of a request: of its answer}."""

    def __init__(self, address: str, requests: int, clients: int):
        self.address, self.pictures = address, {}
        self._left, self._lock = iter(range(requests)), threading.Lock()
        threads = [threading.Thread(target=self._client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self) -> None:
        # plain sockets: clients share the cores with the server
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=600)
        with contextlib.closing(connection):
            while True:
                with self._lock:
                    number = next(self._left, None)
                if number is None:
                    return
                self._ask(connection, number)

    def _ask(self, connection: http.client.HTTPConnection, number: int) -> None:
        body, status = json.dumps({"class": number % CLASSES, "seed": number // CLASSES}), 429
        while status == 429:
            connection.request("POST", "/v1/images/generations", body, JSON)
            answer = connection.getresponse()
            content, status = answer.read(), answer.status
            if status == 429:
                time.sleep(0.2)
        assert status == 200, content[:200]
        self.pictures[number] = json.loads(content)["data"][0]["b64_json"]


class Health:
    """Asks a server how it is, all the time. slowest: seconds of the slowest answer."""

    def __init__(self, address: str):
        self.slowest, self.asked, self._over = 0.0, 0, threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(address,))

    def __enter__(self) -> "Health":
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self, address: str) -> None:
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        while not self._over.wait(0.05):
            start = time.perf_counter()
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            self.slowest = max(self.slowest, time.perf_counter() - start)
            self.asked += 1
        connection.close()


def idle_connections(address: str, count: int) -> list[socket.socket]:
    """Connections that send half a head, and then nothing."""
    host, port = address.removeprefix("http://").split(":")
    found = [socket.create_connection((host, int(port))) for _ in range(count)]
    for connection in found:
        connection.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: 127.")
    return found


def wait_for_batches(server: Process, size: int = 8) -> None:
    while f"varjax_largest_batch {float(size)}" not in _metrics(server):
        time.sleep(0.2)


def test_a_thousand_requests():
    """None is lost, the same request has the same picture; 300 connections that send half a head
    are closed meanwhile, and /healthz answers at once."""
    with process("--policy=headkv", "--budget=0.25") as server:
        wait_for_batches(server)
        start, idle = time.monotonic(), idle_connections(server.address, IDLE)
        with Health(server.address) as health:
            load = Load(server.address, REQUESTS, CLIENTS)
        again = Load(server.address, CLASSES, 1)  # in batches of one
        time.sleep(max(0, 32 - (time.monotonic() - start)))
        for connection in idle:
            connection.settimeout(5)
            assert connection.recv(1) == b""
            connection.close()
    assert health.asked > 100 and health.slowest < 0.1
    assert len(load.pictures) == REQUESTS
    for number, picture in again.pictures.items():
        steps = decoded(load.pictures[number]) - decoded(picture)
        assert np.abs(steps).max() <= 1  # floats of other batch sizes may round to the next byte


def decoded(picture: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture)))).astype(int)


def test_killed_clients_and_sigterm_lose_nothing():
    """Clients vanish, the queue is full, the server is told to end: accepted requests are drawn."""
    with process("--max_batch=2", "--queue=24") as server:
        host, port = server.address.removeprefix("http://").split(":")
        body = b'{"class": 1, "n": 4}'
        head = f"POST /v1/images/generations HTTP/1.1\r\nHost: {host}\r\n"
        head += "Content-Type: application/json\r\nContent-Length: "
        for _ in range(4):  # these vanish
            with socket.create_connection((host, int(port))) as gone:
                gone.sendall(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body)
        statuses, lock = [], threading.Lock()

        def client(number):
            try:
                with httpx.Client(base_url=server.address, timeout=300, trust_env=False) as mine:
                    fields = {"class": number % CLASSES, "seed": number, "n": 2}
                    answer = mine.post("/v1/images/generations", json=fields)
                found = answer.status_code, len(answer.json().get("data", ()))
            except httpx.ConnectError:
                found = "not accepted", 0
            except httpx.TransportError as error:
                found = f"lost: {error!r}", 0
            with lock:
                statuses.append(found)

        threads = [threading.Thread(target=client, args=(n,)) for n in range(24)]
        for thread in threads:
            thread.start()
        while "varjax_queue_images 0.0\n" in _metrics(server):
            time.sleep(0.05)
        server.terminate()
        for thread in threads:
            thread.join()
        assert server.process.wait(90) == 0
    found = {status for status, _ in statuses}
    assert len(statuses) == 24 and found <= {200, 429, 503, "not accepted"}, statuses
    assert 200 in found and all(n == 2 for status, n in statuses if status == 200)


def _metrics(server: Process) -> str:
    return httpx.get(f"{server.address}/metrics", trust_env=False).text
