"""A server under load: 1,000 requests of 32 clients beside 300 idle connections, killed clients,
SIGTERM."""

import base64
import contextlib
import http.client
import io
import json
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.serve.process import Process, process, users_environment

httpx = pytest.importorskip("httpx", reason="needs httpx, of the extra dev")
pytestmark = pytest.mark.slow
REQUESTS, CLIENTS, CLASSES, IDLE = 1000, 32, 44, 300
JSON = {"Content-Type": "application/json"}


class Load:
    """Requests of several clients at once."""

    def __init__(self, address: str, requests: int, clients: int):
        self.address, self._answers, self.seconds, self.refused = address, {}, {}, 0
        self._left, self._lock = iter(range(requests)), threading.Lock()
        threads = [threading.Thread(target=self._client) for _ in range(clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.wall = time.perf_counter() - start

    def _client(self) -> None:
        # plain sockets, and pictures decoded later: clients share the cores with the server
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=600)
        with contextlib.closing(connection):
            while True:
                with self._lock:
                    number = next(self._left, None)
                if number is None:
                    return
                self._ask(connection, number)

    def _ask(self, connection: http.client.HTTPConnection, number: int) -> None:
        start = time.perf_counter()
        body = json.dumps({"class": number % CLASSES, "seed": number // CLASSES})
        while True:
            connection.request("POST", "/v1/images/generations", body, JSON)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 429:
                break
            self.refused += 1
            time.sleep(min(2, int(answer.headers["retry-after"])))
        assert answer.status == 200, content[:200]
        self.seconds[number] = time.perf_counter() - start
        self._answers[number] = content

    @property
    def answers(self) -> dict[int, np.ndarray]:
        """{number of a request: picture}."""
        found = {n: json.loads(content)["data"][0] for n, content in self._answers.items()}
        data = {n: base64.b64decode(one["b64_json"]) for n, one in found.items()}
        return {n: np.asarray(Image.open(io.BytesIO(one))) for n, one in data.items()}


def drawn_by_run(tmp_path, numbers, *flags):
    """{number: picture} as `experiments.run` draws them: for every one picture 0 of its seed."""
    code = (
        "import sys, numpy as np, varjax\n"
        "from varjax.io.images import to_uint8\n"
        "model = varjax.load()\n"
        "policy, budget, *numbers = sys.argv[2:]\n"
        "generator = varjax.Generator(model, policy, float(budget), batch_size=1)\n"
        "found = [generator([int(n) % 44], seed=int(n) // 44)[0] for n in numbers]\n"
        "np.save(sys.argv[1], to_uint8(np.stack(found)))\n"
    )
    path = tmp_path / "run.npy"
    command = [sys.executable, "-c", code, str(path), *flags, *map(str, numbers)]
    subprocess.run(command, check=True, cwd=ROOT, env=users_environment())
    return dict(zip(numbers, np.load(path), strict=True))


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


def test_a_thousand_requests(tmp_path):
    """None is lost, every picture is `run`'s, memory stays; 300 connections that send half a head
    are closed meanwhile, and /healthz answers at once."""
    with process("--policy=headkv", "--budget=0.25") as server:
        wait_for_batches(server)
        Load(server.address, 128, CLIENTS)  # threads and connections take memory once
        before = server.resident_bytes
        idle = idle_connections(server.address, IDLE)
        with Health(server.address) as health:
            load = Load(server.address, REQUESTS, CLIENTS)
        grown = server.resident_bytes - before
        time.sleep(max(0, 32 - load.wall))
        for connection in idle:
            connection.settimeout(5)
            assert connection.recv(1) == b""
            connection.close()
    assert health.asked > 100 and health.slowest < 0.1
    assert len(load.answers) == REQUESTS
    assert grown < 64 * 2**20
    expected = drawn_by_run(tmp_path, range(REQUESTS), "headkv", "0.25")
    differ = [n for n in expected if (load.answers[n] != expected[n]).any()]
    steps = [np.abs(load.answers[n].astype(int) - expected[n]).max() for n in differ]
    print(f"{len(differ)} pictures differ in a byte, by at most {max(steps, default=0)}")
    assert max(steps, default=0) <= 1  # floats of other batch sizes may round to the next byte


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
