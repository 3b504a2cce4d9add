"""A server in a thread of the tests, on a small model."""

import asyncio
import base64
import contextlib
import functools
import http.client
import io
import json
import socket
import threading
import time

import numpy as np
from PIL import Image

from experiments.serve.drawing import Drawn
from experiments.serve.subjects import subjects
from tests import models_under_test as models
from varjax.calibration import files as calibration_lib
from varjax.core.planner import plan_cache
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.policies import get_policy
from varjax.storage import pictures

MODEL, POLICY, BUDGET = "c_k5_nol2norm", "streaming", 0.6
KEY = "of-the-tests"
JSON = "application/json"


def plan_of(model, choice):
    found = calibration_lib.find(choice.policy, model, None, choice.sampling.guidance)
    return plan_cache(model.geometry_for(choice.sampling), choice.policy, found)


def programs_of(model, most=2, policy=POLICY, budget=BUDGET, make=None, segments=1):
    """Programs of a model that compiles quickly."""
    from experiments.serve.programs import Choice, Programs

    def generator(plan, sampling, size, build):
        return Generator(model, plan=plan, sampling=sampling, batch_size=size, build=build)

    cut = segments if model.geometry.schedule.num_scales else "auto"
    usual = Choice(get_policy(policy, budget), model.sampling())
    planned = functools.partial(plan_of, model)
    building = {"make": make or generator, "plan_of": planned, "build": Build(segments=cut)}
    return Programs(model, usual, most=most, **building)


def service_of(programs, most=6, **options):
    from experiments.serve.programs import Batcher
    from experiments.serve.service import Service

    model = programs.model
    given = {"seconds": 60.0} | options
    return Service(model=model, subjects=subjects(model), batcher=Batcher(programs, most), **given)


class FakePrograms:
    """Draws at once, or when it is told to; a picture says its item's seed."""

    def __init__(self, sizes=(1, 2, 4)):
        self.batches, self.drawn, self.drawing = dict.fromkeys(sizes), [], 0
        self.largest, self.go = max(sizes), asyncio.Event()
        self.go.set()

    def size_for(self, waiting):
        from experiments.serve.programs import Programs

        return Programs.size_for(self, waiting)

    async def draw(self, items):
        self.drawing = len(items)
        await self.go.wait()
        self.drawing = 0
        self.drawn.append(list(items))
        if any(item.seed == 666 for item in items):
            raise RuntimeError("a batch that fails")
        batch = object()
        return [Drawn(np.full((2, 2, 3), i.seed, np.uint8), None, 0.0, batch) for i in items]


@contextlib.contextmanager
def running(app, seconds=20):
    """The address of an application that is served on the loopback address. seconds: for what was
    accepted, at the end."""
    import uvicorn

    from experiments.serve.server import Connection

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(512)
        config = uvicorn.Config(
            app, http=Connection, ws="none", log_level="error", timeout_graceful_shutdown=seconds
        )
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


def raw(address, data, timeout=20):
    """What a server answers to bytes: status, headers, body as JSON or bytes."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as connection:
        connection.sendall(data)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        body = answer.read()
    with contextlib.suppress(ValueError):
        body = json.loads(body)
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def head(method, path, *lines, host="127.0.0.1", body=b""):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *lines]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def post(path, body, kind=JSON, *lines, **more):
    return head("POST", path, f"Content-Type: {kind}", *lines, body=body, **more)


def assert_form(found, status, param=None):
    assert found[0] == status, found
    error = found[2]["error"]
    assert set(error) == {"message", "type", "param"} and error["message"] and error["type"]
    assert error["param"] == param, error
    assert found[1]["content-type"] == JSON
    assert "Traceback" not in error["message"] and len(error["message"]) <= 2000
    return error


def guarded(drawn, **rules):
    """The address of a server whose programs draw nothing in these tests, with rules."""
    from experiments.serve.api import make_app
    from experiments.serve.guard import Rules

    rules = Rules(**{"body_seconds": 1.0} | rules)
    return running(make_app(service_of(drawn, rules=rules)))


def pictures_of(answer):
    assert answer.status_code == 200, answer.text
    data = [base64.b64decode(entry["b64_json"]) for entry in answer.json()["data"]]
    return np.stack([np.asarray(Image.open(io.BytesIO(one))) for one in data])


def close(found, expected):
    """Programs of other batch sizes may round a float differently, so a byte may be off by one."""
    return (np.abs(found.astype(int) - expected) <= 1).all()


def edit_files(drawn=None, kind="PNG"):
    height, width = models.fixture_model(MODEL).pixels
    rows = np.linspace(0, 255, height).astype(np.uint8)
    picture = np.ascontiguousarray(np.broadcast_to(rows[:, None, None], (height, width, 3)))
    if drawn is None:
        drawn = np.zeros((height, width), np.uint8)
        drawn[height // 2 :] = 255
    files = {"image": pictures.png(picture), "mask": pictures.png(drawn)}
    return picture, {name: (f"../../{name}", data, "image/png") for name, data in files.items()}


@contextlib.contextmanager
def busy(service):
    """Nothing is drawn meanwhile."""
    gate = threading.Event()
    hold = service.programs._drawer.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()
        hold.result(30)


def wait_until(true):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
