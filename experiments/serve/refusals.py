"""Errors in the form that clients of OpenAI's API read: {"error": {"message", "type", "param"}}."""

import contextlib
import json
from collections.abc import Iterator

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from varjax.errors import UserError

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
    """What a client is told of an error; of a bug nothing but that it is one."""
    if isinstance(error, HTTPException):
        return error
    return Refused(422, str(error)) if isinstance(error, UserError) else Refused(500, FAILED)


def ends() -> Refused:
    """What a server says that ends."""
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
