"""Answers that are no pictures: errors in the form that clients of OpenAI's API read.

{"error": {"message", "type", "param"}}, with headers that keep a browser from guessing and caching.
"""

from starlette.responses import JSONResponse

MOST_WORDS = 2000  # characters of an error
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
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


def error(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    """Return an error. param: the field that it is about. headers: with _ for -."""
    # JSON may hold halves of characters, which no answer can be written with
    message, param = (
        text and text[:MOST_WORDS].encode("utf-8", "replace").decode() for text in (message, param)
    )
    content = {"message": message, "type": TYPES.get(status, "server_error"), "param": param}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({"error": content}, status, headers=HEADERS | named)
