"""The HTTP interface of a server: OpenAI's images API, health, models, metrics, the page.

    POST /v1/images/generations   JSON: prompt or class, n, size, seed, policy, budget, stream ...
    POST /v1/images/edits         a form with the files image and mask besides
    GET  /v1/models, /v1/models/NAME, /v1/gallery, /v1/gallery/NUMBER, /healthz, /metrics
    GET  /, /docs, /openapi.json

Errors are {"error": {"message", "type", "param"}}. Nothing that a client sends names a file.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import varjax
from experiments.serve import page, requests
from experiments.serve.guard import (
    EDITS,
    GENERATIONS,
    HEADERS,
    Guard,
    Refused,
    answer,
    ends,
    refused,
)
from experiments.serve.requests import EditRequest, ImageRequest
from experiments.serve.service import Service
from varjax.core.errors import UserError

ENDING = 0.5  # seconds for a batch that nobody waits for any more
WRONG = dict.fromkeys(
    (400, 401, 403, 408, 413, 415, 422, 429, 503, 504), {"model": requests.Errors}
)
ANSWERS = {200: {"model": requests.Pictures, "content": {"text/event-stream": {}}}} | WRONG
FILE = {"type": "string", "format": "binary", "description": "PNG, JPEG or WebP, the model's size."}
HIDDEN = {"include_in_schema": False}


def make_app(service: Service) -> FastAPI:
    """Return the application. Its start and end start the drawing and wait for it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        more = asyncio.create_task(page.prepare(service))
        yield
        more.cancel()
        service.programs.close()
        await service.batcher.close(ENDING)

    app = FastAPI(
        title="varjax",
        version=varjax.__version__,
        description="Pictures of visual autoregressive models with a compressed KV cache.",
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = requests.StrictRoute
    for kind in (HTTPException, RequestValidationError, UserError, Exception):
        app.add_exception_handler(kind, _answer_error)
    if origins := service.rules.origins:
        may = {"allow_methods": ["GET", "POST"], "allow_headers": ["Authorization", "Content-Type"]}
        app.add_middleware(CORSMiddleware, allow_origins=origins, **may)
    app.add_middleware(Guard, rules=service.rules, answers=service.batcher.requests)
    _add_information(app, service)
    _add_drawing(app, service)
    return app


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    invalid = isinstance(error, RequestValidationError)
    found = requests.wrong(error, ImageRequest) if invalid else refused(error)
    if "GET" in (found.headers or {}).get("Allow", ""):
        found.headers = {"Allow": f"{found.headers['Allow']}, HEAD"}
    return answer(found)


def _add_information(app: FastAPI, service: Service) -> None:
    """Add the routes that draw nothing."""
    kind = {"Content-Type": CONTENT_TYPE_LATEST}
    text = lambda: Response(generate_latest(service.batcher.registry), headers=kind)  # noqa: E731
    models = lambda: {"object": "list", "data": [service.described()]}  # noqa: E731
    app.get("/healthz", summary="Whether the server runs")(lambda: {"status": "ok"})
    app.get("/metrics", **HIDDEN)(text)
    app.get("/v1/models", summary="The model, what requests may ask of it, what it costs")(models)
    app.get("/v1/gallery", summary="Pictures of the server's own")(lambda: page.listed(service))
    app.get("/docs", **HIDDEN)(lambda: HTMLResponse(page.described(app.openapi())))
    app.get("/", **HIDDEN)(page.answer)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        if name != service.model.name:
            raise Refused(404, f"there is no such model: this server has {service.model.name}")
        return service.described()

    @app.get("/v1/gallery/{number}")
    async def picture(number: str) -> Response:
        found = service.gallery.get(int(number) if number.isdecimal() and len(number) < 9 else -1)
        if not found:
            raise Refused(404, "this picture was not drawn")
        return Response(found, media_type="image/png", headers={"Cache-Control": "max-age=3600"})


def _add_drawing(app: FastAPI, service: Service) -> None:
    """Add the routes that draw."""
    schema = EditRequest.model_json_schema()
    schema["properties"] |= {"image": FILE, "mask": FILE}
    form = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}

    @app.post(GENERATIONS, responses=ANSWERS)
    async def generate(request: Request, asked: ImageRequest) -> Response:
        """Draw pictures of a class or a prompt."""
        return await _answer(service, request, asked, None)

    @app.post(EDITS, responses=ANSWERS, openapi_extra={"requestBody": form})
    async def edit(request: Request) -> Response:
        """Draw a part of a picture anew."""
        return await _answer(service, request, *await requests.read_form(request))


async def _answer(
    service: Service, request: Request, asked: ImageRequest, files: dict[str, bytes] | None
) -> Response:
    """The answer to a request, also if the time for the end is over meanwhile."""
    service.check(asked)
    try:
        # room before anything is planned or decoded: who is refused costs nothing
        with service.batcher.room(asked.n):
            order = await service.order(asked, files)
            found = None if asked.stream else await order.whole(request.is_disconnected)
    except asyncio.CancelledError:
        raise ends() from None
    if asked.stream:
        return StreamingResponse(order.events(), media_type="text/event-stream", headers=HEADERS)
    return JSONResponse(found, headers=HEADERS)
