"""The HTTP server around the application: connections that are few and do not idle, errors of the
protocol in the API's form, and an end that comes in time.

uvicorn alone waits for ever for the head of a first request, and hears of signals in its loop.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from experiments.serve.guard import Refused, content
from experiments.serve.programs import COMPILING, DRAWING
from experiments.serve.service import REQUEST_SECONDS

HEAD_SECONDS = 30  # for the head of a request
SENDING_SECONDS = 30  # for an answer, besides the time that drawing may take
DRAIN_SECONDS = 60  # for what was accepted, after SIGTERM
MOST_CONNECTIONS = 1024
SPARE = 64  # descriptors for everything but connections
MANY = Refused(503, "too many connections: try again later")
NO_HTTP = Refused(400, "this is no HTTP request that can be read")


class Connection(H11Protocol):
    """A client's connection. Of all that there may be, `most`, one address holds at most half."""

    most, held = MOST_CONNECTIONS, Counter[str]()

    @classmethod
    def fit_descriptors(cls) -> None:
        """Allow fewer connections where the process may have fewer descriptors."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY:
            cls.most = max(2, min(MOST_CONNECTIONS, descriptors - SPARE))

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.address, self.timer = self.client and self.client[0], None
        self.held[self.address] += 1
        self._limit_time()
        if self.held.total() > self.most or self.held[self.address] > self.most // 2:
            self._refuse(MANY)

    def connection_lost(self, exc) -> None:
        self.timer.cancel()
        self.held[self.address] -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # the head is there; a part of one wins no time
            self._limit_time()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may go on with a request that came meanwhile
        self._limit_time()

    def _limit_time(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        answers = self.cycle is not None and not self.cycle.response_complete
        seconds = REQUEST_SECONDS + SENDING_SECONDS if answers else HEAD_SECONDS
        self.timer = self.loop.call_later(seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self._refuse(NO_HTTP)

    def _refuse(self, error: Refused) -> None:
        """Answer what no application sees, and close."""
        body = json.dumps(content(error)).encode()
        head = f"HTTP/1.1 {error.status_code} \r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Serves until a signal comes, then until what was accepted is drawn; at most so many seconds,
    whatever hangs: signals are heard, and the time is kept, on threads of their own."""

    def __init__(
        self, app: FastAPI, ready: Callable[[], None], drain_seconds: float = DRAIN_SECONDS
    ):
        config = uvicorn.Config(
            app,
            http=Connection,
            loop="asyncio",  # others take the ear for themselves
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=drain_seconds - min(3, drain_seconds / 2),
        )
        super().__init__(config)
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):  # else the process would end at once
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(drain_seconds,), daemon=True).start()
        self._ready = ready

    def capture_signals(self) -> contextlib.nullcontext:
        return contextlib.nullcontext()  # `_listen` hears them

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()

    def _listen(self, seconds: float) -> None:
        self._ear.recv(1)
        self.should_exit = True
        self._ear.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            self._ear.recv(1)  # somebody is impatient
            leave(130, always=True)
        print(f"error: something hangs, {seconds:g} s are over", file=sys.stderr)
        leave(1, always=True)


def leave(status: int = 0, always: bool = False) -> None:
    """End the process at once if a thread still works for nobody: a program that is being compiled
    cannot be stopped, and an interpreter that ends waits for it."""
    names = [thread.name for thread in threading.enumerate() if thread.is_alive()]
    if always or any(name.startswith((COMPILING, DRAWING)) for name in names):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
