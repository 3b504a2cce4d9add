"""What stands before every request: limits on bodies that nobody measured, the key."""

import asyncio
import base64
import json
import time

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")

from experiments.serve import guard  # noqa: E402
from experiments.serve.metrics import Metrics  # noqa: E402

KEY = "of-the-tests"


def call(app, *, path="/x", headers=(), parts=(b"",), wait=0.0):
    """Status, headers and body that an application answers to a body in parts."""
    left, sent = list(parts), []

    async def receive():
        await asyncio.sleep(wait)
        if not left:
            return {"type": "http.disconnect"}
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers]
    asyncio.run(app(scope, receive, send))
    start = [message for message in sent if message["type"] == "http.response.start"]
    assert len(start) == 1, "one answer"
    body = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    found = {name.decode(): value.decode() for name, value in start[0]["headers"]}
    return start[0]["status"], found, body


class Reader:
    """Reads a body and answers with its length. As frameworks do, it fails when a body breaks off,
    or answers with words of its own."""

    def __init__(self, careless=False):
        self.careless, self.read = careless, 0

    async def __call__(self, scope, receive, send):
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                if not self.careless:
                    raise RuntimeError("broken off")
                break
            self.read += len(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(self.read).encode()})


def limited(app, most=10, seconds=5.0):
    return guard.Limited(app, most=lambda path: most, seconds=seconds)


@pytest.mark.parametrize("careless", [False, True])
def test_bytes_are_counted_as_they_come(careless):
    """Also when no head tells how many there will be."""
    status, _, body = call(limited(Reader(careless)), parts=[b"12345"] * 2)
    assert (status, body) == (200, b"10")
    app = Reader(careless)
    status, _, body = call(limited(app), parts=[b"12345"] * 100)
    error = json.loads(body)["error"]
    assert status == 413 and "10 bytes" in error["message"] and error["type"]
    assert app.read <= 10


@pytest.mark.parametrize("length", ["11", "9" * 400], ids=["11", "many"])
def test_a_body_that_says_it_is_too_large_is_not_read(length):
    app = Reader()
    status, _, _ = call(limited(app), headers=[("content-length", length)], parts=[b"x" * 11])
    assert status == 413 and app.read == 0


def test_a_wrong_length_is_counted():
    for length in ("-5", "٣", "x", "3"):
        headers = [("content-length", length)] if length.isascii() else []
        assert call(limited(Reader()), headers=headers, parts=[b"x" * 11])[0] == 413


@pytest.mark.parametrize("careless", [False, True])
def test_a_body_that_does_not_come(careless):
    start = time.monotonic()
    app = limited(Reader(careless), seconds=0.1)
    status, _, body = call(app, parts=[b"1", b"2"], wait=30)
    assert status == 408 and json.loads(body)["error"]["type"] == "timeout_error"
    assert time.monotonic() - start < 10


def test_a_bug_stays_one():
    async def fails(scope, receive, send):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call(limited(fails))


def test_limits_of_paths():
    assert guard.most_bytes("/v1/images/generations") == guard.MOST_JSON
    assert guard.most_bytes("/v1/images/edits") == guard.MOST_FILE
    assert guard.most_bytes("/gradio_api/queue/join") == guard.MOST_PAGE
    for path in (guard.UPLOAD, f"{guard.UPLOAD}/"):
        assert guard.MOST_FILE < guard.most_bytes(path) < 1.01 * guard.MOST_FILE


def basic(password, name="me"):
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        ("/v1/models", None, 401),
        ("/v1/models", "Bearer other", 401),
        ("/v1/models", KEY, 401),
        ("/v1/models", f"Bearer {KEY}", 200),
        ("/v1/models", f"bearer {KEY}", 200),
        ("/v1/models", f"BEARER   {KEY} ", 200),
        ("/v1/models", basic(KEY), 401),
        ("/v1", None, 401),
        ("/", None, 401),
        ("/gradio_api/upload", None, 401),
        ("/gradio_api/upload", basic("other"), 401),
        ("/gradio_api/upload", "Basic \xff\xff", 401),
        ("/gradio_api/upload", basic(KEY), 200),
        ("/gradio_api/upload", basic(KEY, ""), 200),
        ("/", f"Bearer {KEY}", 200),
        ("/healthz", None, 200),
        ("/metrics", None, 200),
        ("/metrics/", None, 401),
    ],
)
def test_the_key(path, given, status):
    app = guard.Watched(Reader(), key=KEY, metrics=Metrics())
    headers = [] if given is None else [("authorization", given)]
    found, heads, _ = call(app, path=path, headers=headers)
    assert found == status
    assert ("www-authenticate" in heads) == (status == 401)
    assert call(guard.Watched(Reader(), key=None, metrics=Metrics()), path=path)[0] == 200


def test_answers_are_counted_without_paths_of_clients():
    metrics = Metrics()
    for path in ("/v1/images/edits", "/v1/a", "/b", '/"c'):
        call(guard.Watched(Reader(), key=None, metrics=metrics), path=path)
    text = metrics.text({})
    assert 'path="/v1/images/edits",status="200"} 1' in text
    assert 'path="/v1",status="200"} 1' in text and 'path="page",status="200"} 2' in text
