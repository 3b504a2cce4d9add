"""The end of a server: in time, whatever hangs, and with status 0 if nothing does."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.conftest import ROOT
from tests.often import often
from tests.serve.process import users_environment

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
httpx = pytest.importorskip("httpx", reason="needs httpx, of the extra dev")

DRAIN, MARGIN = 60, 10  # seconds; the latter for a machine that does other things, too

# A server without a model, which is told to end while something happens.
SCRIPT = """
import contextlib, signal, socket, sys, threading, time
import fastapi
from experiments.serve.server import Connection, Server, leave

@contextlib.asynccontextmanager
async def lifespan(app):
    EARLY
    yield
    print("closed", flush=True)

app = fastapi.FastAPI(lifespan=lifespan)

@app.get("/hangs")
async def hangs():
    print("hangs", flush=True)
    time.sleep(1000)  # in the event loop

with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    port = listening.getsockname()[1]
    server = Server(app, lambda: print(f"ready {port}", flush=True), 2)
    server.run(sockets=[listening])
leave()
"""


def started(early="pass"):
    code = SCRIPT.replace("EARLY", early)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = users_environment()
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, **pipes)


def test_sigterm_while_it_starts():
    ended = started("signal.raise_signal(signal.SIGTERM); time.sleep(0.5)")
    out, err = ended.communicate(timeout=60)
    assert ended.returncode == 0 and out == "closed\n", err


@pytest.mark.parametrize("number", often([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_the_end_of_an_idle_server(number):
    server = started()
    assert server.stdout.readline().startswith("ready")
    server.send_signal(number)
    assert server.wait(20) == 0 and server.stdout.read() == "closed\n"


@pytest.mark.parametrize("impatient", often([False], [False, True]))
def test_whatever_hangs(impatient):
    """The event loop itself hears nothing any more: the process ends all the same, and at once for
    a person who is impatient."""
    server = started()
    port = server.stdout.readline().split()[1]
    asking = threading.Thread(target=_ask, args=(f"http://127.0.0.1:{port}/hangs",))
    asking.start()
    assert server.stdout.readline() == "hangs\n"
    start = time.monotonic()
    server.send_signal(signal.SIGINT if impatient else signal.SIGTERM)
    if impatient:
        time.sleep(0.3)
        server.send_signal(signal.SIGINT)
        assert server.wait(1.5) == 130
    else:
        assert server.wait(30) == 1 and "something hangs" in server.stderr.read()
        assert 1.5 < time.monotonic() - start < 2 + MARGIN
    asking.join()


def _ask(url):
    with pytest.raises(httpx.TransportError):
        httpx.get(url, timeout=60, trust_env=False)


def ended(server) -> float:
    """Seconds from SIGTERM to the end, whose status is 0."""
    start = time.monotonic()
    server.terminate()
    assert server.process.wait(DRAIN + MARGIN + 60) == 0
    return time.monotonic() - start
