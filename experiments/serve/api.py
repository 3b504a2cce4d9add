"""The HTTP interface of a server: OpenAI's images API, health, models, metrics.

    POST /v1/images/generations   JSON: prompt or class, n, size, seed, response_format
    POST /v1/images/edits         a form with the files image and mask besides
    GET  /v1/models, /v1/models/NAME, /healthz, /metrics

Errors are {"error": {"message", "type", "param"}}. Nothing that a client sends names a file.
"""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from experiments.serve import answers, forms, guard, requests
from experiments.serve.batcher import Batcher, Closed, QueueFull
from experiments.serve.drawer import Item, Patch
from experiments.serve.guard import EDITS, GENERATIONS
from experiments.serve.metrics import Metrics
from experiments.serve.requests import BadRequest, ImageRequest, Limits
from experiments.serve.subjects import Subjects
from varjax.io import pictures
from varjax.model import Model

MOST_UPLOAD_PIXELS = 2**24
UPLOADS = 16  # forms with pictures that are in memory at once; others are read later
LOOKING = 1.0  # seconds between two looks whether a client is still there
AGAIN = "5"  # seconds, after which another server may be there
LEVEL = 3  # of PNG's compression: half the time of the usual 6, files a fifteenth larger
METHODS = {  # of all paths that are no page
    "/healthz": "GET",
    "/metrics": "GET",
    "/v1/models": "GET",
    GENERATIONS: "POST",
    EDITS: "POST",
}
NOTHING = ("/openapi.json", "/docs", "/redoc", "/gradio_api/openapi.json")


@dataclass(frozen=True, kw_only=True)
class Service:
    """What answers requests: the model's side of a server.

    api_key: what clients must send (`guard.Watched`); None: nothing. body_seconds, seconds: that a
    client may take to send a body, and an answer may take. drain_seconds: that the end may take.
    closing: what is called in the event loop when the end begins, before the last pictures are
    drawn; once or twice.
    """

    model: Model
    subjects: Subjects
    batcher: Batcher
    metrics: Metrics
    api_key: str | None = None
    body_seconds: float = 30.0
    seconds: float = 600.0
    drain_seconds: float = 60.0
    started: int = field(default_factory=lambda: int(time.time()))
    closing: list[Callable[[], None]] = field(default_factory=list)
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UPLOADS))

    @property
    def limits(self) -> Limits:
        return Limits(self.model.name, self.model.pixels, self.batcher.most)

    def items(self, request: ImageRequest, patch: Patch | None = None) -> list[Item]:
        """The images of a request. `BadRequest` if the model cannot draw what it says."""
        with requests.field("class" if request.prompt is None else "prompt"):
            condition = self.subjects.of(request.prompt, request.label)
        return [Item(condition, request.seed, i, patch) for i in range(request.n)]


def make_app(service: Service) -> FastAPI:
    """Return the application. Its start and end start the drawing and wait for it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        for close in service.closing:
            close()
        await asyncio.to_thread(service.batcher.close, service.drain_seconds)

    app = FastAPI(title="varjax", lifespan=lifespan, openapi_url=None)
    app.add_exception_handler(BadRequest, _bad_request)
    app.add_exception_handler(QueueFull, _full)
    app.add_exception_handler(Closed, _closed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(guard.Limited, most=guard.most_bytes, seconds=service.body_seconds)
    app.add_middleware(guard.Watched, key=service.api_key, metrics=service.metrics)
    app.get("/healthz")(lambda: {"status": "ok"})
    app.get("/metrics")(lambda: PlainTextResponse(service.metrics.text(_gauges(service))))
    app.get("/v1/models")(lambda: {"object": "list", "data": [_model(service)]})
    app.add_api_route("/v1/models/{name:path}", _one_model(service), methods=["GET"])
    for path, answer in ((GENERATIONS, _generations), (EDITS, _edits)):
        # plain routes: the body is read here, with limits, and never by the framework
        app.add_route(path, partial(_answered, service, answer), methods=["POST"])
    # before the page, which is mounted at / and would answer in its own words
    for path, allowed in METHODS.items():
        app.router.routes.append(Route(path, _Elsewhere(allowed)))
    app.router.routes.append(Route("/v1/models/{name:path}", _Elsewhere("GET")))
    for path in (*NOTHING, "/v1", "/v1/{rest:path}"):
        app.router.routes.append(Route(path, _Elsewhere()))
    return app


# --- what is no picture ---------------------------------------------------------------------------


async def _bad_request(request: Request, error: BadRequest) -> JSONResponse:
    return answers.error(error.status, error.message, error.param)


async def _full(request: Request, error: QueueFull) -> JSONResponse:
    return answers.error(429, str(error), retry_after=str(error.seconds))


async def _closed(request: Request, error: Closed) -> JSONResponse:
    return answers.error(503, "the server ends: ask another one", retry_after=AGAIN)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    return answers.error(error.status_code, str(error.detail))


async def _bug(request: Request, error: Exception) -> JSONResponse:
    return answers.error(500, "the server failed at this request; its log says why")


class _Elsewhere:
    """Answers what no route takes: a method that does not work at a path (None: anything there)."""

    def __init__(self, allowed: str | None = None):
        self.allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = answers.error(404, "there is nothing here")
        if self.allowed is not None:
            words = f"{scope['method'][:20]} does not work here, {self.allowed} does"
            answer = answers.error(405, words, allow=self.allowed)
        await answer(scope, receive, send)


# --- answers --------------------------------------------------------------------------------------


def _model(service: Service) -> dict:
    model, limits = service.model, service.limits
    return {
        "id": model.name,
        "object": "model",
        "created": service.started,
        "owned_by": "varjax",
        "family": model.family.name,
        "size": limits.size,
        "classes": service.subjects.names,
    }


def _one_model(service: Service):
    def answer(name: str) -> dict:
        if name != service.model.name:
            raise BadRequest(404, f"there is no such model: this server has {service.model.name}")
        return _model(service)

    return answer


def _gauges(service: Service) -> dict[str, int]:
    batcher = service.batcher
    largest = batcher.drawer.generators[batcher.drawer.largest]
    return {
        "varjax_queue_images": batcher.depth,
        "varjax_queue_limit": batcher.most,
        "varjax_largest_batch": batcher.drawer.largest,
        "varjax_kv_bytes": largest.plan.num_bytes(largest.batch_size, largest.kv_dtype),
    }


async def _answered(service: Service, answer: Callable, request: Request) -> JSONResponse:
    """The answer of a route, also if the time for the end is over meanwhile."""
    start = time.perf_counter()
    try:
        found = await answer(service, request)
    except asyncio.CancelledError:
        words = "the server ended before this was drawn"
        return answers.error(503, words, retry_after=AGAIN)
    service.metrics.served(time.perf_counter() - start)
    return found


async def _generations(service: Service, request: Request) -> JSONResponse:
    asked = requests.check(requests.parse_json(await forms.body(request)), service.limits)
    with service.batcher.reserve(asked.n) as places:
        # a class is looked up at once; a text encoder takes its time
        quick = service.subjects.names is not None
        items = service.items(asked) if quick else await asyncio.to_thread(service.items, asked)
        futures = places.fill(items)
    return await _drawn(service, request, asked, futures)


async def _edits(service: Service, request: Request) -> JSONResponse:
    async with service.uploads:  # while what was sent is in memory
        asked, futures = await _taken_edits(service, request)
    return await _drawn(service, request, asked, futures)


async def _taken_edits(service: Service, request: Request) -> tuple[ImageRequest, list[Future]]:
    form = await forms.form(request)
    files = {name: form.pop(name, None) for name in forms.FILES}
    asked = requests.check(requests.parse_form(form), service.limits, edit=True)
    for name, content in files.items():
        if not isinstance(content, bytes):
            raise BadRequest(422, f"{name} is missing: send it as a file of the form", name)
    # a place before anything is decoded: who is refused costs nothing
    with service.batcher.reserve(asked.n) as places:
        items = await asyncio.to_thread(_edited_items, service, asked, files)
        return asked, places.fill(items)


def _edited_items(service: Service, asked: ImageRequest, files: dict[str, bytes]) -> list[Item]:
    limit = {"most_pixels": MOST_UPLOAD_PIXELS}
    with requests.field("image"):
        picture = pictures.read_picture(files["image"], "image", **limit)
    with requests.field("mask"):
        drawn = pictures.read_mask(files["mask"], "mask", **limit)
    size = service.limits.pixels
    for name, array in (("image", picture), ("mask", drawn)):
        if array.shape[:2] != size:
            given = f"{array.shape[1]}x{array.shape[0]}"
            wanted = f"the model draws {service.limits.size}: resize it"
            raise BadRequest(422, f"{name} has {given} pixels, {wanted}", name)
    if not drawn.any() or drawn.all():
        what = "white: all would be drawn" if drawn.any() else "black: nothing would be drawn"
        raise BadRequest(422, f"mask is all {what}; paint what is to be drawn white", "mask")
    with requests.field("mask"):
        patch = Patch.of(service.model, picture, drawn, asked.paste)
    return service.items(asked, patch)


async def _drawn(
    service: Service, request: Request, asked: ImageRequest, futures: list[Future]
) -> JSONResponse:
    """Answer with pictures, when they are drawn."""
    found = await _while_there(service, request, futures)
    encode = lambda: [base64.b64encode(pictures.png(image, LEVEL)).decode() for image in found]  # noqa: E731
    texts = await asyncio.to_thread(encode)
    data = [{"b64_json": text, "seed": asked.seed} for text in texts]
    return JSONResponse({"created": int(time.time()), "data": data}, headers=answers.HEADERS)


async def _while_there(
    service: Service, request: Request, futures: list[Future]
) -> list[np.ndarray]:
    """Wait for pictures; take images back that nobody waits for any more."""
    waiting = asyncio.gather(*map(asyncio.wrap_future, futures))
    # looked at here, also when nobody waits for it any more: else it is reported as forgotten
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    end = time.monotonic() + service.seconds
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(waiting), LOOKING)
            if time.monotonic() > end:
                raise BadRequest(504, f"no picture within {service.seconds:g} s: try again later")
            if await request.is_disconnected():
                raise BadRequest(408, "the client went away")
    finally:
        if not waiting.done():
            waiting.cancel()
            for future in futures:
                future.cancel()
