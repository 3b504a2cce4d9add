"""A server in a thread of the tests, on a small model."""

import contextlib
import socket
import threading
import time

import numpy as np

from experiments.serve.batcher import Batcher
from experiments.serve.drawer import Drawer
from experiments.serve.metrics import Metrics
from tests import models_under_test as models
from varjax.generator import Generator

MODEL, POLICY, BUDGET = "c_k5_nol2norm", "streaming", 0.6


def small_drawer(sizes=(1, 2), name=MODEL) -> Drawer:
    model = models.fixture_model(name)
    return Drawer(
        model, lambda size: Generator(model, POLICY, BUDGET, batch_size=size, segments=1), sizes
    )


class FakeDrawer:
    """Draws at once, or when it is told to; a picture says its item."""

    def __init__(self, sizes=(1, 2, 4)):
        self.sizes, self.batches, self.drawing, self.go = sizes, [], 0, threading.Event()
        self.go.set()

    @property
    def largest(self):
        return self.sizes[-1]

    def size_for(self, waiting):
        return Drawer.size_for(self, waiting)

    def draw(self, items):
        self.drawing = len(items)
        assert self.go.wait(30)
        self.drawing = 0
        self.batches.append(list(items))
        if any(item.seed == 666 for item in items):
            raise RuntimeError("a batch that fails")
        return [np.full((2, 2, 3), item.seed, np.uint8) for item in items]


def batcher_of(drawer, most=8) -> Batcher:
    return Batcher(drawer, most, Metrics())


@contextlib.contextmanager
def running(app, seconds=20):
    """The address of an application that is served on the loopback address. seconds: for what was
    accepted, at the end."""
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=seconds)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
