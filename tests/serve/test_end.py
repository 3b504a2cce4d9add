"""The end of a server whose page is open, or compiles a program: in time, with status 0."""

import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.serve.process import process, users_environment

pytest.importorskip("gradio", reason="needs the extra serve")
httpx = pytest.importorskip("httpx", reason="needs httpx, of the extra dev")

DRAIN = 30
MARGIN = 20  # seconds, for a machine that does other things, too
SESSION = {"session_hash": "visitor"}


def ask_for_a_picture(client, policy):
    """As the page does. Its events come at /gradio_api/queue/data."""
    config = client.get("/config").json()
    draw = next(d for d in config["dependencies"] if d["api_name"] == "job")
    values = {c["id"]: c["props"].get("value") for c in config["components"]}
    data = [values[number] for number in draw["inputs"]]
    data[2] = policy
    answer = client.post(
        "/gradio_api/queue/join", json={"data": data, "fn_index": draw["id"], **SESSION}
    )
    assert answer.status_code == 200


# A signal that comes when the server has begun to start, and nothing listens to it yet.
EARLY = """
import signal, socket, sys
import fastapi, uvicorn
from experiments.serve.__main__ import FLAGS, serve

class Server(uvicorn.Server):
    def run(self, sockets):
        signal.raise_signal(signal.SIGTERM)
        super().run(sockets)

uvicorn.Server = Server
FLAGS.values(sys.argv)
with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    serve(fastapi.FastAPI(), listening, [lambda: print("closed")])
"""


def test_sigterm_while_it_starts():
    ended = subprocess.run(
        [sys.executable, "-c", EARLY],
        cwd=ROOT,
        env=users_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0 and ended.stdout == "closed\n", ended.stderr
    assert "ready" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True], ids=["idle", "compiles"])
def test_sigterm_with_a_page(compiles):
    path = "/gradio_api/queue/data?session_hash=visitor"
    with (
        process("--max_batch=1", f"--drain_seconds={DRAIN}") as server,
        httpx.Client(base_url=server.address, timeout=120, trust_env=False) as client,
        # an open page listens to this as long as it is open
        client.stream("GET", "/gradio_api/heartbeat/visitor") as heart,
    ):
        beats = heart.iter_bytes()  # iterators are held: httpx closes what nobody iterates
        next(beats)
        if not compiles:
            assert ended(server) < MARGIN  # it waits for no visitor
        else:
            ask_for_a_picture(client, "h2o")
            with client.stream("GET", path) as events:
                lines = events.iter_lines()
                while "compiling its program" not in next(lines):
                    pass
                assert ended(server) < DRAIN + MARGIN
        assert "Traceback" not in "\n".join(server.lines), server.lines


def ended(server) -> float:
    """Seconds from SIGTERM to the end, whose status is 0."""
    start = time.monotonic()
    server.terminate()
    assert server.process.wait(DRAIN + MARGIN + 60) == 0
    seconds = time.monotonic() - start
    print(f"ended in {seconds:.1f} s")
    return seconds
