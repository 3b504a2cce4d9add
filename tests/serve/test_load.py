"""A server under load: killed clients, a full queue, SIGTERM."""

import socket
import threading
import time

import pytest

from tests.serve.process import Process, process

httpx = pytest.importorskip("httpx", reason="needs httpx, of the extra dev")
pytestmark = pytest.mark.slow
CLASSES = 44


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
