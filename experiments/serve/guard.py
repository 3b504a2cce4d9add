"""What stands before every request, the page's too: the key, and limits on what is sent.

Plain ASGI applications: the framework's own kind of middleware would keep from the routes that a
client went away. Bytes are counted as they come, so that a body whose length nobody told is limited
as well.
"""

import asyncio
import base64
import hmac
import math
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from experiments.serve import answers
from experiments.serve.metrics import Metrics

API = "/v1"
GENERATIONS, EDITS = PLAIN = (f"{API}/images/generations", f"{API}/images/edits")
OPEN = ("/healthz", "/metrics")  # for probes and scrapers, which have no key
MOST_JSON = 2**16  # bytes of a request for pictures
MOST_PAGE = 2**20  # of what the page sends of itself: names of uploads, values of fields
MOST_FILE = 2**24  # of an uploaded file, or of a form with picture and mask
HEADS = 2**14  # of the parts of a form, around a file
UPLOAD = "/gradio_api/upload"


def most_bytes(path: str) -> int:
    """How many bytes a body may have."""
    if path.rstrip("/") == UPLOAD:
        return MOST_FILE + HEADS
    if path == EDITS:
        return MOST_FILE
    return MOST_JSON if _is_api(path) else MOST_PAGE


def _is_api(path: str) -> bool:
    return path == API or path.startswith(f"{API}/")


class Watched:
    """Checks the key of every request, and counts its answer.

    The API takes the key as a bearer. All else but `OPEN` asks for it as a browser does: any name,
    and the key as password. No route of the page's framework answers before that.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, metrics: Metrics):
        self.app, self.key, self.metrics = app, key, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # nothing here speaks over web sockets
            return await send({"type": "websocket.close", "code": 1008})
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await (self._refusal(scope) or self.app)(scope, receive, watched)
        finally:
            self.metrics.answered(_label(scope), status)

    def _refusal(self, scope: Scope) -> Response | None:
        path = scope["path"]
        if self.key is None or path in OPEN:
            return None
        scheme, _, given = Request(scope).headers.get("authorization", "").partition(" ")
        scheme, given = scheme.lower(), given.strip()
        if scheme == "bearer" and _same(given, self.key):
            return None
        if _is_api(path):
            words = "wrong or missing API key: send Authorization: Bearer KEY"
            return answers.error(401, words, www_authenticate="Bearer")
        # browsers send a password to any page that asks for it; the API is not open to that
        if scheme == "basic" and _same(_password(given), self.key):
            return None
        words = "the page asks for the server's API key: any name, and the key as password"
        return answers.error(401, words, www_authenticate='Basic realm="varjax", charset="UTF-8"')


def _same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode())


def _password(given: str) -> str:
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _label(scope: Scope) -> str:
    """What metrics call a path: a client's own paths are no labels."""
    path = scope["path"]
    if path in PLAIN or path in OPEN:
        return path  # plain routes leave no name in the scope
    route = getattr(scope.get("route"), "path", None)
    return route or (API if _is_api(path) else "page")


class Limited:
    """Refuses bodies that are too large (413) or do not come (408).

    most: bytes of a body, by path. seconds: that a client may take to send one.
    """

    def __init__(self, app: ASGIApp, *, most: Callable[[str], int], seconds: float):
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = _Body(receive, send, self.most(scope["path"]), self.seconds)
        if _declared(scope) > body.most:
            return await body.too_large()(scope, receive, send)
        try:
            await self.app(scope, body.receive, body.send)
        except Exception:  # what the application makes of a body that ends
            if body.refusal is None:
                raise
        if body.refusal is not None and not body.answered:
            await body.refusal(scope, receive, send)


def _declared(scope: Scope) -> float:
    """The length of a body, as its head has it."""
    length = Request(scope).headers.get("content-length", "")
    if not length.isascii() or not length.isdecimal():
        return 0
    return int(length) if len(length) < 16 else math.inf


class _Body:
    """A body while it comes. refusal: what is answered instead of the application's words."""

    def __init__(self, receive: Receive, send: Send, most: int, seconds: float):
        self._receive, self._send, self.most, self.seconds = receive, send, most, seconds
        self.refusal: Response | None = None
        self.answered = self._whole = False
        self._bytes, self._end = 0, None

    def too_large(self) -> Response:
        return answers.error(413, f"the body has more than {self.most} bytes")

    async def receive(self) -> Message:
        if self.refusal is None and not self._whole:
            message = await self._next()
        elif self.refusal is None:
            return await self._receive()  # until the client goes away
        if self.refusal is not None:
            return {"type": "http.disconnect"}  # the application stops reading
        return message

    async def _next(self) -> Message | None:
        self._end = self._end or time.monotonic() + self.seconds
        try:
            message = await asyncio.wait_for(self._receive(), self._end - time.monotonic())
        except TimeoutError:
            self.refusal = answers.error(408, f"no whole body within {self.seconds:g} s")
            return None
        self._bytes += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._bytes > self.most:
            self.refusal = self.too_large()
        return message

    async def send(self, message: Message) -> None:
        if self.refusal is not None and not self.answered:
            return  # it is not the application that answers
        self.answered = self.answered or message["type"] == "http.response.start"
        await self._send(message)
