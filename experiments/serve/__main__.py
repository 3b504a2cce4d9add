"""A page and an API that draw pictures, on one server.

    python -m experiments.serve
    python -m experiments.serve --policy=headkv --budget=0.1 --kv_bytes=64MiB --port=7860

The page is at http://127.0.0.1:7860/, the API under /v1: POST /v1/images/generations and
/v1/images/edits as OpenAI's clients send them, GET /v1/models; also /healthz and /metrics.
--policy and --budget are the API's; the page has its own choice. SIGTERM ends the server when all
that it accepted is drawn. Anyone who reaches the address may use it: it is this machine's own
unless --host says otherwise; give --api_key then.
"""

import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.budgets import parse_bytes
from experiments.flags.model import ModelFlags
from experiments.flags.policy import PolicyFlags, plan_remarks
from experiments.flags.program import ProgramFlags
from experiments.flags.sampling import SamplingFlags
from experiments.serve.batcher import COMPILING, DRAWING, Batcher
from experiments.serve.drawer import Drawer, fitting, ladder
from experiments.serve.metrics import Metrics
from experiments.serve.subjects import subjects
from varjax.cache.plan import CachePlan
from varjax.cli import command_line
from varjax.cli.flags import CommandFlags, about
from varjax.engine.memory import show_bytes
from varjax.errors import UserError, require
from varjax.generator import Generator
from varjax.model import Model
from varjax.sampling import Sampling
from varjax.storage import ordinary

MOST_BATCH, MOST_QUEUE = 1024, 10**6
LONGEST_KEY = 4096  # bytes
BACKLOG = 2048  # connections that wait to be accepted

if TYPE_CHECKING:
    from fastapi import FastAPI

FLAGS = CommandFlags(
    "--policy=headkv --budget=0.25 --port=7860",
    "policy budget kv_bytes checkpoint host port api_key queue max_batch page",
)
MODEL = ModelFlags(FLAGS)
POLICY = PolicyFlags(FLAGS, sizes=False)
SAMPLING = SamplingFlags(FLAGS, seed=False)
PROGRAM = ProgramFlags(FLAGS, batches=False)
FLAGS.compilation_cache()
HOST = FLAGS.string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 is every one.")
PORT = FLAGS.integer("port", 7860, "Port; 0: any free one.", lower_bound=0, upper_bound=65535)
QUEUE = FLAGS.integer(
    "queue",
    64,
    "Pictures that may wait; more are refused (429).",
    lower_bound=1,
    upper_bound=MOST_QUEUE,
)
MAX_BATCH = FLAGS.integer(
    "max_batch", 8, "Images drawn at once, at most.", lower_bound=1, upper_bound=MOST_BATCH
)
KV_BYTES = FLAGS.string(
    "kv_bytes", None, "Bytes that keys and values may take, as 2GiB: decides how many images fit."
)
API_KEY = FLAGS.string(
    "api_key",
    None,
    "File whose first line clients must send as `Authorization: Bearer KEY`; the page's password.",
)
SECONDS = FLAGS.floating(
    "request_seconds", 600.0, "Seconds that an answer may take.", lower_bound=1
)
DRAIN = FLAGS.integer(
    "drain_seconds", 60, "Seconds for what was accepted, after SIGTERM.", lower_bound=1
)
PAGE = FLAGS.boolean("page", True, "Also serve the page at /.")


def read_key() -> str | None:
    """The API key; None if there is none. `UserError` if the file holds none that can be sent."""
    if not API_KEY.value:
        return None
    with about(API_KEY):
        lines = ordinary.read(API_KEY.value, LONGEST_KEY).decode("ascii", "replace").splitlines()
        key = lines[0].strip() if lines else ""
        if not key or not key.isascii() or not key.isprintable():
            raise UserError("its first line must be the key, printable ASCII")
        return key


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Resolved:
    """What the flags say. model: without its weights. most: images at once."""

    model: Model
    plan: CachePlan
    sampling: Sampling
    dtype: str
    most: int


def resolve() -> Resolved:
    """Check every flag and plan the cache. Compile and allocate nothing."""
    model, policy = PROGRAM.stored(MODEL.resolve()), POLICY.resolve()
    sampling, program = SAMPLING.sampling(model), PROGRAM.resolve(model)
    with about(SECONDS):
        if not math.isfinite(SECONDS.value):  # bounds of flags let it through
            raise UserError(f"{SECONDS.value} is no time: give a number of seconds")
    plan, calibration = POLICY.plan(policy, model, sampling)
    with about(KV_BYTES):
        kv_bytes = None if KV_BYTES.value is None else parse_bytes(KV_BYTES.value)
        most = fitting(plan, program.kv_dtype, kv_bytes, MAX_BATCH.value)
    policy.check_images(1)
    for line in plan_remarks(plan, calibration):
        say(line)
    say(
        f"{policy.name}, budget {plan.budget:g}: {show_bytes(plan.num_bytes(1, program.kv_dtype))} "
        f"of keys and values for an image, {most} images at once"
    )
    return Resolved(model=model, plan=plan, sampling=sampling, dtype=program.dtype, most=most)


def make_drawer(found: Resolved) -> Drawer:
    """Load the model, and return what draws for the API."""
    model = found.model.load_weights(found.dtype)

    def make(size: int) -> Generator:
        return generator(model, found.plan, found.sampling, size)

    return Drawer(model, make, ladder(found.most))


def generator(model: Model, plan: CachePlan, sampling: Sampling, size: int, **more) -> Generator:
    """Return the generator of a batch size, as the flags have it."""
    program = PROGRAM.resolve(model)
    return Generator(
        model,
        plan=plan,
        sampling=sampling,
        batch_size=size,
        segments=program.segments,
        layers=program.layers,
        attention=program.attention,
        kv_dtype=program.kv_dtype,
        matmul_precision=program.matmul_precision,
        decode_batch=program.decoding.at_once,
        decode_dtype=program.decoding.dtype,
        **more,
    )


def bound_socket() -> socket.socket:
    """Return a socket that listens. `UserError` if the address is taken or is none."""
    try:
        family = socket.getaddrinfo(HOST.value, PORT.value, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((HOST.value, PORT.value))
        # from now on: only a socket that listens keeps another server from the same port. Clients
        # that come while programs are compiled wait to be accepted.
        found.listen(BACKLOG)
        return found
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--host={HOST.value} --port={PORT.value}: {reason}; choose another address or port, "
            f"--port=0 takes any free one"
        ) from None


def serve(app: "FastAPI", listening: socket.socket, closing: list[Callable[[], None]]) -> None:
    """Serve until SIGTERM or SIGINT, then until what was accepted is drawn. closing: as of
    `Service`."""
    import uvicorn

    host, port = listening.getsockname()[:2]
    early = []  # signals of the time before uvicorn listens to them

    class Server(uvicorn.Server):
        async def main_loop(self) -> None:
            self.should_exit |= bool(early)
            if not self.should_exit:
                say(f"ready at http://{f'[{host}]' if ':' in host else host}:{port}/")
            await super().main_loop()  # it looks at `should_exit` first

        async def shutdown(self, sockets=None) -> None:
            for close in closing:  # before it waits for connections, which open pages hold
                close()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN.value
    )
    # uvicorn drains at the first signal, and hands it on at the end: by then all is done
    signal.signal(signal.SIGTERM, lambda number, frame: early.append(number))
    try:
        Server(config).run(sockets=[listening])
    except KeyboardInterrupt:  # of SIGINT, which uvicorn hands on
        leave()
        raise
    leave()


def leave() -> None:
    """End the process at once if a thread still works for nobody: a program that is being compiled
    cannot be stopped, and an interpreter that ends waits for it."""
    names = [thread.name for thread in threading.enumerate() if thread.is_alive()]
    if any(name.startswith((COMPILING, DRAWING)) for name in names):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main(argv: list[str]) -> None:
    for module in ("fastapi", "uvicorn", "python_multipart", "PIL.Image"):
        require(module, extra="serve", purpose="a server")
    if PAGE.value:
        require("gradio", extra="serve", purpose="the page (--nopage does without)")
    from experiments.serve.api import Service, make_app

    key, listening = read_key(), bound_socket()
    with listening:
        drawer, metrics = make_drawer(resolve()), Metrics()
        service = Service(
            model=drawer.model,
            subjects=subjects(drawer.model),
            batcher=Batcher(drawer, QUEUE.value, metrics),
            metrics=metrics,
            api_key=key,
            seconds=SECONDS.value,
            drain_seconds=DRAIN.value,
        )
        app = make_app(service)
        if PAGE.value:
            from experiments.serve.page import mount

            app = mount(app, service, generator)
        drawer.compile(say)
        serve(app, listening, service.closing)


if __name__ == "__main__":
    command_line.run(main)
