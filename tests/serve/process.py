"""`python -m experiments.serve` as a process of its own, on the demo."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading

from tests.conftest import ROOT

SILENT_SECONDS = (
    600  # between two lines at the start: compiling, on a machine that does other things
)


def users_environment() -> dict[str, str]:
    """The environment of a process that compiles as users do, not as tests do."""
    leave = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "PJRT_NPROC")
    return {k: v for k, v in os.environ.items() if k not in leave} | {"JAX_PLATFORMS": "cpu"}


class Process:
    """A running server. address: where it is; lines: what it said on standard error."""

    def __init__(self, *flags: str):
        environment = users_environment() | {"PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "experiments.serve", "--port=0", *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        self.lines, self._found = [], queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.address = self._ready()
        except BaseException:
            self.process.kill()  # nobody else knows it
            raise

    def _ready(self) -> str:
        """The address, once it serves. As long as it says something, it is waited for."""
        said = -1
        while said < len(self.lines):
            said = len(self.lines)
            with contextlib.suppress(queue.Empty):
                address = self._found.get(timeout=SILENT_SECONDS)
                assert address, "\n".join(self.lines)
                return address
        raise AssertionError("\n".join([*self.lines, f"... and nothing for {SILENT_SECONDS} s"]))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if line.startswith("ready at "):
                self._found.put(line.split()[-1].rstrip("/"))
        self._found.put(None)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def process(*flags: str):
    """A server that ends with the test."""
    server = Process(*flags)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.terminate()
            try:
                server.process.wait(90)
            except subprocess.TimeoutExpired:
                server.process.kill()
