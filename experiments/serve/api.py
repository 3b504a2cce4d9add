"""The HTTP interface of a server: OpenAI's images API, health, models, metrics.

    POST /v1/images/generations   JSON: prompt or class, n, size, seed, response_format
    POST /v1/images/edits         a form with the files image and mask besides
    GET  /v1/models, /v1/models/NAME, /healthz, /metrics

Errors are {"error": {"message", "type", "param"}}. Nothing that a client sends names a file.
"""

import asyncio
import base64
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from experiments.serve import requests
from experiments.serve.batcher import Batcher, Closed, QueueFull
from experiments.serve.drawer import Item, Patch
from experiments.serve.metrics import Metrics
from experiments.serve.requests import BadRequest, ImageRequest, Limits
from experiments.serve.subjects import Subjects
from varjax.io import pictures
from varjax.model import Model

MOST_JSON = 2**16  # bytes of a body
MOST_WORDS = 2000  # characters of an error
MOST_UPLOAD = 2**24  # of one with pictures
MOST_UPLOAD_PIXELS = 2**24
LOOKING = 1.0  # seconds between two looks whether a client is still there
LEVEL = 3  # of PNG's compression: half the time of the usual 6, files a fifteenth larger
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
PLAIN = ("/v1/images/generations", "/v1/images/edits")
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


@dataclass(frozen=True, kw_only=True)
class Service:
    """What answers requests: the model's side of a server.

    api_key: what clients must send as a bearer; None: nothing. body_seconds, seconds: that a
    client may take to send a body, and an answer may take. drain_seconds: that the end may take.
    closing: what is called at the end, before the last pictures are drawn.
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

    app = FastAPI(title="varjax", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(BadRequest, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(Watched, service=service)
    app.get("/healthz")(lambda: {"status": "ok"})
    app.get("/metrics")(lambda: PlainTextResponse(service.metrics.text(_gauges(service))))
    app.get("/v1/models")(lambda: {"object": "list", "data": [_model(service)]})
    app.add_api_route("/v1/models/{name:path}", _one_model(service), methods=["GET"])
    generations, edits = partial(_generations, service), partial(_edits, service)
    for path, answer in (("generations", generations), ("edits", edits)):
        # plain routes: the body is read here, with limits, and never by the framework
        app.add_route(f"/v1/images/{path}", answer, methods=["POST"])
    # before the page, which is mounted at / and would answer in its own words
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    app.add_route("/v1/{rest:path}", _nothing_here, methods=methods)
    return app


async def _nothing_here(request: Request) -> JSONResponse:
    known = request.url.path in ("/v1/models", *PLAIN)
    raise HTTPException(405 if known else 404)


# --- around every request -------------------------------------------------------------------------


def _error(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    # JSON may hold halves of characters, which no answer can be written with
    message, param = (
        text and text[:MOST_WORDS].encode("utf-8", "replace").decode() for text in (message, param)
    )
    content = {"message": message, "type": TYPES.get(status, "server_error"), "param": param}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({"error": content}, status, headers=HEADERS | named)


async def _bad_request(request: Request, error: BadRequest) -> JSONResponse:
    return _error(error.status, error.message, error.param)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    words = {404: "there is nothing here", 405: f"{request.method} does not work here"}
    return _error(error.status_code, words.get(error.status_code, str(error.detail)))


async def _bug(request: Request, error: Exception) -> JSONResponse:
    return _error(500, "the server failed at this request; its log says why")


class Watched:
    """Checks the key of every request, and counts its answer.

    A plain ASGI application: the framework's own kind of middleware would keep from the routes that
    a client went away.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app, words = self.app, "wrong or missing API key: send Authorization: Bearer KEY"
        if scope["path"].startswith("/v1") and not _is_known(self.service, Request(scope)):
            app = _error(401, words)
        try:
            await app(scope, receive, watched)
        finally:
            # plain routes leave no name in the scope; a client's own paths are no labels
            route = getattr(scope.get("route"), "path", None)
            other = "/v1" if scope["path"].startswith("/v1") else "page"
            path = scope["path"] if scope["path"] in PLAIN else route or other
            self.service.metrics.answered(path, status)


def _is_known(service: Service, request: Request) -> bool:
    if service.api_key is None:
        return True
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return hmac.compare_digest(given.encode(), service.api_key.encode())


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


async def _generations(service: Service, request: Request) -> JSONResponse:
    fields = requests.parse_json(await _body(service, request, MOST_JSON))
    asked = requests.check(fields, service.limits)
    # a class is looked up at once; a text encoder takes its time
    quick = service.subjects.names is not None
    items = service.items(asked) if quick else await asyncio.to_thread(service.items, asked)
    return await _drawn(service, request, asked, items)


async def _edits(service: Service, request: Request) -> JSONResponse:
    form = await _form(service, request)
    files = {name: form.pop(name, None) for name in ("image", "mask")}
    asked = requests.check(requests.parse_form(form), service.limits, edit=True)
    for name, content in files.items():
        if not isinstance(content, bytes):
            raise BadRequest(422, f"{name} is missing: send it as a file of the form", name)
    items = await asyncio.to_thread(_edited_items, service, asked, files)
    return await _drawn(service, request, asked, items)


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
    service: Service, request: Request, asked: ImageRequest, items: list[Item]
) -> JSONResponse:
    """Have the images drawn, and answer with them."""
    start = time.perf_counter()
    try:
        futures = service.batcher.submit(items)
    except QueueFull as error:
        return _error(429, str(error), retry_after=str(error.seconds))
    except Closed:
        return _error(503, "the server ends: ask another one", retry_after="5")
    try:
        found = await _while_there(service, request, futures)
    except asyncio.CancelledError:  # the time for the end is over
        return _error(503, "the server ended before this was drawn", retry_after="5")
    encode = lambda: [base64.b64encode(pictures.png(image, LEVEL)).decode() for image in found]  # noqa: E731
    texts = await asyncio.to_thread(encode)
    service.metrics.served(time.perf_counter() - start)
    data = [{"b64_json": text, "seed": asked.seed} for text in texts]
    return JSONResponse({"created": int(time.time()), "data": data}, headers=HEADERS)


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


# --- bodies ---------------------------------------------------------------------------------------


async def _body(service: Service, request: Request, most: int) -> bytes:
    """The body, up to a number of bytes and within some seconds."""
    too_large = BadRequest(413, f"the body has more than {most} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 12 or int(length) > most):
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(service.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise BadRequest(408, f"no whole body within {service.body_seconds:g} s") from None
    except ClientDisconnect:
        raise BadRequest(408, "the client went away") from None
    return b"".join(parts)


async def _form(service: Service, request: Request) -> dict[str, str | bytes]:
    """The fields of a form, files as bytes."""
    if "multipart/form-data" not in request.headers.get("content-type", ""):
        raise BadRequest(400, "send a form (multipart/form-data) with the files image and mask")
    body = await _body(service, request, MOST_UPLOAD)

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    parsed = Request(request.scope, receive)
    try:
        async with parsed.form(max_files=4, max_fields=32, max_part_size=MOST_JSON) as form:
            return {
                # OpenAI's clients name several pictures image[]
                name.removesuffix("[]"): (
                    await value.read() if isinstance(value, UploadFile) else value
                )
                for name, value in form.multi_items()
            }
    except (MultiPartException, HTTPException, KeyError, ValueError) as error:
        reason = getattr(error, "message", None) or getattr(error, "detail", "")
        raise BadRequest(400, f"the form cannot be read: {reason!s:.120}") from None
