"""Checks before every route: the names that the server answers to, the pages that may speak to it,
the key, the kind and the size of a request. And refusals, in the form that clients of OpenAI's API
read: {"error": {"message", "type", "param"}}.

Plain ASGI: the framework's own kind of middleware would keep from the routes that a client went
away. Bytes are counted as they come, so that a body whose length nobody told is limited as well.
"""

import asyncio
import base64
import contextlib
import hmac
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from varjax.core.errors import UserError

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
OPEN = ("/healthz", "/metrics")  # for probes and scrapers, which have no key
KINDS = {GENERATIONS: "application/json", EDITS: "multipart/form-data"}
MOST_JSON = 2**16  # bytes of a request for pictures
MOST_FORM = 2**24  # of a form with picture and mask
MOST_HELD = 2**28  # of all bodies that are in memory at once
LOGIN = 'Basic realm="varjax", charset="UTF-8"'
MOST_WORDS = 2000  # characters of an error
AGAIN = "5"  # seconds, after which another try may be worth it
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
TYPES |= {408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error"}
FAILED = "the server failed at this request; its log says why"


class Refused(HTTPException):
    """A request that is not served: a status, words for people, the field that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, **headers: str):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(status, message, named or None)
        self.param = param


@contextlib.contextmanager
def about(name: str) -> Iterator[None]:
    """Turn a `UserError` inside into a `Refused` about a field of the request."""
    try:
        yield
    except UserError as error:
        raise Refused(422, str(error), name) from None


def refused(error: Exception) -> HTTPException:
    """Answer to a client about an error; about a bug it says only that it is one."""
    if isinstance(error, HTTPException):
        return error
    return Refused(422, str(error)) if isinstance(error, UserError) else Refused(500, FAILED)


def ends() -> Refused:
    return Refused(503, "the server ends: ask another one", retry_after=AGAIN)


def content(error: HTTPException) -> dict:
    """The JSON of an error."""
    usual = "invalid_request_error" if error.status_code < 500 else "server_error"
    told = {"message": str(error.detail), "param": getattr(error, "param", None)}
    # JSON may hold halves of characters, which no answer can be written with
    told = {n: t and t[:MOST_WORDS].encode("utf-8", "replace").decode() for n, t in told.items()}
    return {"error": told | {"type": TYPES.get(error.status_code, usual)}}


def event(told: dict) -> str:
    """One event of a stream; an error has no type."""
    return f"event: {told.get('type', 'error')}\ndata: {json.dumps(told)}\n\n"


def answer(error: HTTPException) -> JSONResponse:
    headers = HEADERS | dict(error.headers or {})
    return JSONResponse(content(error), error.status_code, headers=headers)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules that a server's requests must meet.

    host: the name or address that it was told to listen at. hosts: other names that it answers to,
      "*" for any. origins: pages of other servers that may speak to it (CORS).
    key: what clients must send; None: nothing. body_seconds: that they may take to send a body.
    """

    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    key: str | None = None
    body_seconds: float = 30.0


class Guard:
    """Checks every request, counts every answer, and answers HEAD as GET without a body."""

    def __init__(self, app: ASGIApp, *, rules: Rules, answers: Counter):
        self.app, self.rules, self.answers = app, rules, answers
        self.held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, body = None, _Body(self, receive, scope["path"])

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = scope | {"method": "GET"}
        try:
            self._check(scope, Headers(scope=scope))
            await self.app(scope, body.receive, counted)
        except Refused as error:
            if status is None:
                await answer(error)(scope, receive, counted)
        except asyncio.CancelledError:  # of events, at the end
            if status is None:
                raise
            await send({"type": "http.response.body", "body": event(content(ends())).encode()})
        finally:
            self.held -= body.size
            # a client's own paths are no labels
            known = scope["path"] if scope["path"] in (*KINDS, *OPEN) else "other"
            path = getattr(scope.get("route"), "path", known)
            self.answers.labels(path, str(status or 500)).inc()

    def _check(self, scope: Scope, headers: Headers) -> None:
        """`Refused` for a request that must not reach a route."""
        host, origins, path = headers.get("host", ""), headers.getlist("origin"), scope["path"]
        name, bound = _place(f"//{host}")[0], scope["server"]
        # a name that somebody else's DNS points to this machine would let their pages speak to it
        known = {"localhost", self.rules.host, *self.rules.hosts, bound and bound[0]}
        if name is None or not {name, "*"} & known:
            raise Refused(403, "this server does not answer to this Host: see --allowed_hosts")
        shows = scope["method"] == "GET" and path == "/"
        own, allowed = _place(f"//{host}"), set(self.rules.origins)
        may = [_place(origin) == own or {origin, "*"} & allowed for origin in origins]
        if not shows and not all(may):
            raise Refused(403, "pages of other servers may not use this one: see --cors_origin")
        # a browser that asks whether it may send something sends no key yet, and is told no more
        locked = self.rules.key is not None and path not in OPEN and scope["method"] != "OPTIONS"
        if locked and not self._knows_key(headers):
            words = "wrong or missing API key: send Authorization: Bearer KEY (or as a password)"
            raise Refused(401, words, www_authenticate=LOGIN)
        wanted = KINDS.get(path) if scope["method"] == "POST" else None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if wanted is not None and kind != wanted:
            raise Refused(415, f"send Content-Type: {wanted}")

    def _knows_key(self, headers: Headers) -> bool:
        """The key comes as a bearer; or as a browser asks for it, any name and it as password."""
        scheme, _, value = headers.get("authorization", "").partition(" ")
        try:
            if scheme.lower() == "basic":
                value = base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except ValueError:
            return False
        right = hmac.compare_digest(value.strip().encode(), self.rules.key.encode())
        return right and scheme.lower() in ("bearer", "basic")


class _Body:
    """A body while it comes: `Refused` if it is too large, or does not come in time."""

    def __init__(self, guard: Guard, receive: Receive, path: str):
        self.guard, self._receive, self.size, self.whole = guard, receive, 0, False
        self.most = MOST_FORM if path == EDITS else MOST_JSON
        self.end = time.monotonic() + guard.rules.body_seconds

    async def receive(self) -> Message:
        if self.whole:
            return await self._receive()  # until the client goes away
        try:
            left = max(0, self.end - time.monotonic())
            message = await asyncio.wait_for(self._receive(), left)
        except TimeoutError:
            seconds = self.guard.rules.body_seconds
            raise Refused(408, f"no whole body within {seconds:g} s", connection="close") from None
        size = len(message.get("body", b""))
        self.size, self.guard.held = self.size + size, self.guard.held + size
        self.whole = not message.get("more_body", False)
        if self.size > self.most:
            raise Refused(413, f"the body has more than {self.most} bytes", connection="close")
        if self.guard.held > MOST_HELD:
            raise Refused(429, "too much is being sent: try again later", retry_after=AGAIN)
        return message


def _place(url: str) -> tuple[str | None, int | None]:
    """The name and the port of an address, the usual ports as None; (None, None) if it is none."""
    try:
        found = urlsplit(url)
        name, port = found.hostname, found.port
    except ValueError:
        return None, None
    name = None if name is None or "@" in found.netloc else name.rstrip(".")
    return name, None if port in (80, 443) else port
