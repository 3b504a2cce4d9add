"""Requests of a hostile client, byte by byte: every answer has the documented form, nothing names a
file, nobody waits for others."""

import base64
import io
import json
import socket
import time

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("python_multipart", reason="needs the extra serve")

from experiments.serve import guard  # noqa: E402
from experiments.serve.api import make_app  # noqa: E402
from experiments.serve.guard import EDITS, GENERATIONS  # noqa: E402
from tests.serve.server import (  # noqa: E402
    JSON,
    KEY,
    assert_form,
    edit_files,
    guarded,
    head,
    post,
    raw,
    service_of,
)

FORM = "multipart/form-data; boundary=b"


# --- nothing names a file ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/file=/etc/passwd",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/gallery/..%2f..%2fetc%2fpasswd",
        "/v1/gallery/-1",
        "/v1/models//etc/passwd",
        "/static/../page.html",
        "/page.html",
        "/redoc",
        "//etc/passwd",
    ],
)
def test_no_route_serves_a_path(address, path):
    for method in ("GET", "POST"):
        found = raw(address, head(method, path, body=b"{}" if method == "POST" else b""))
        assert found[0] in (404, 405)
        assert_form(found, found[0])


def test_only_our_routes_exist(programs):
    app = make_app(service_of(programs))
    paths = {route.path for route in app.routes}
    ours = {"/", "/docs", "/openapi.json", "/healthz", "/metrics", GENERATIONS, EDITS}
    ours |= {"/v1/models", "/v1/models/{name:path}", "/v1/gallery", "/v1/gallery/{number}"}
    assert paths == ours


@pytest.mark.parametrize(
    "given",
    [
        {"image": {"path": "/dev/zero"}},
        {"class": 1, "policy": "scalekv", "policy_args": {"budgets": "/dev/zero"}},
        {"class": 1, "policy": "table", "policy_args": {"path": "/etc/passwd"}},
        {"class": 1, "policy": "compose", "policy_args": {"allocate_path": "/etc/passwd"}},
        {"class": 1, "policy": "h2o", "policy_args": {"calibration": "/etc/passwd"}},
    ],
)
def test_no_field_names_a_file(address, given):
    start = time.monotonic()
    found = raw(address, post(GENERATIONS, json.dumps(given).encode()))
    assert found[0] == 422 and "root:" not in str(found[2])
    assert_form(found, 422, found[2]["error"]["param"])
    assert time.monotonic() - start < 5


def test_uploads_are_never_on_a_disk(address, monkeypatch, tmp_path):
    """Also of forms that are cut off, and larger than what starlette keeps in memory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = []
    for name in ("TemporaryFile", "NamedTemporaryFile", "mkstemp"):
        monkeypatch.setattr(f"tempfile.{name}", lambda *a, name=name, **k: made.append(name))
    large = form({"image": bytes(3 * 2**20)}, whole=False)
    assert_form(raw(address, post(EDITS, large, FORM)), 400)
    assert_form(raw(address, post(EDITS, form({"image": bytes(3 * 2**20)}), FORM)), 422, "mask")
    assert not made and not list(tmp_path.iterdir())


# --- hosts, origins, kinds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:9999", 200),
        ("localhost:7860", 200),
        ("LOCALHOST.", 200),
        ("evil.example", 403),
        ("evil.example:7860", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("[::1]", 403),
        ("[", 403),
        ("", 403),
        ("a b", 403),
        ("127.0.0.1:x", 403),
        ("a@127.0.0.1", 403),
    ],
)
def test_hosts(address, host, status):
    """A name that somebody's DNS points to this machine (rebinding) is not served."""
    for path in ("/healthz", "/v1/models", "/"):
        found = raw(address, head("GET", path, host=host))
        assert found[0] == status, (path, found)
        if status == 403:
            assert_form(found, 403)


def test_origins(address):
    """Pages of other servers may look at the page, and at nothing else."""
    body = json.dumps({"class": "x"}).encode()
    own = "http://127.0.0.1:7860"
    for origin, status in (
        (own, 422),
        ("http://127.0.0.1:9999", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://127.0.0.1:7860.evil.example", 403),
        ("http://localhost:7860", 403),
    ):
        asked = post(GENERATIONS, body, JSON, f"Origin: {origin}", host="127.0.0.1:7860")
        found = raw(address, asked)
        assert found[0] == status, (origin, found)
        assert not any(name.startswith("access-control") for name in found[1])
        for path in ("/v1/models", "/healthz", "/metrics", "/openapi.json", "/docs"):
            asked = head("GET", path, f"Origin: {origin}", host="127.0.0.1:7860")
            assert raw(address, asked)[0] == (200 if origin == own else 403)
    evil = "Origin: http://evil.example"
    two = head("GET", "/v1/models", "Origin: http://127.0.0.1", evil)
    assert_form(raw(address, two), 403)
    assert raw(address, head("GET", "/", evil))[0] == 200
    asked = ("Access-Control-Request-Method: POST", evil)
    assert_form(raw(address, head("OPTIONS", GENERATIONS, *asked)), 403)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (GENERATIONS, "text/plain"),
        (GENERATIONS, "application/x-www-form-urlencoded"),
        (GENERATIONS, FORM),
        (EDITS, JSON),
        (EDITS, "application/x-www-form-urlencoded"),
        (EDITS, "text/plain; multipart/form-data"),
    ],
)
def test_kinds_of_bodies(address, path, kind):
    """What a page of another server can send without asking first is not read."""
    assert_form(raw(address, post(path, b'{"class": 1}', kind)), 415)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' is there twice"),
        (b"[" * 60_000, "nested more than"),
        (b'{"prompt":', "Expecting value"),
        (b"\xff", "can't decode"),
        (b"[1]", "send an object of fields as JSON"),
    ],
)
def test_json_that_is_none(address, body, reason):
    error = assert_form(raw(address, post(GENERATIONS, body, JSON)), 400)
    assert reason in error["message"]
    assert error["message"].endswith("send an object of fields as JSON")


# --- the key --------------------------------------------------------------------------------------


def basic(password, name="me"):
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def test_the_key(programs):
    with guarded(programs, key=KEY) as address:
        paths = "/ /v1/models /v1/gallery /docs /openapi.json /nothing /metrics/".split()
        for path in (*paths, GENERATIONS):
            for given in (None, "Bearer other", KEY, basic("other"), "Basic \xff\xff", "Basic"):
                lines = [] if given is None else [f"Authorization: {given}"]
                found = raw(address, head("POST" if path == GENERATIONS else "GET", path, *lines))
                assert_form(found, 401)
                assert found[1]["www-authenticate"].startswith("Basic")
        for given in (f"Bearer {KEY}", f"bearer  {KEY} ", basic(KEY), basic(KEY, "")):
            for path in ("/", "/v1/models", "/docs"):
                found = raw(address, head("GET", path, f"Authorization: {given}"))
                assert found[0] == 200, (given, path)
        for path in ("/healthz", "/metrics"):
            assert raw(address, head("GET", path))[0] == 200


# --- bodies ---------------------------------------------------------------------------------------


def form(files, fields=(), whole=True):
    head = '--b\r\nContent-Disposition: form-data; name="{0}"; filename="../../{0}"\r\n\r\n'
    parts = [head.format(name).encode() + data + b"\r\n" for name, data in files.items()]
    parts += [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'.encode()
        for name, text in fields
    ]
    return b"".join(parts) + (b"--b--\r\n" if whole else b"")


def small_files():
    return {name: data for name, (_, data, _) in edit_files()[1].items()}


def test_a_form_that_is_cut_off_loses_no_field(address):
    """Wherever it is cut."""
    whole = form(small_files(), [("class", "1"), ("n", "99"), ("seed", "7")])
    assert_form(raw(address, post(EDITS, whole, FORM)), 422, "n")
    last = len(whole) - len(b"--\r\n")
    for cut in (last, last - 2, last - 4, whole.index(b"7\r\n--b--"), whole.index(b'"n"'), 60, 5):
        assert_form(raw(address, post(EDITS, whole[:cut], FORM)), 400)
    nothing = post(EDITS, b"x", "multipart/form-data")
    assert_form(raw(address, nothing), 400)


def test_errors_of_the_protocol(address):
    for data in (
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 100_000,
    ):
        found = raw(address, data)
        assert_form(found, 400)
        assert found[1]["connection"] == "close"


def test_head_is_get_without_a_body(address):
    for path in ("/healthz", "/metrics", "/v1/models", "/", "/docs", "/openapi.json"):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head("HEAD", path, "Connection: close"))
            answer = b""
            while part := connection.recv(2**16):
                answer += part
        headers, _, body = answer.partition(b"\r\n\r\n")
        assert headers.startswith(b"HTTP/1.1 200") and b"content-length: " in headers and not body


def test_bodies_are_counted_as_they_come(address):
    large = post(GENERATIONS, b"x" * (guard.MOST_JSON + 1))
    assert_form(raw(address, large), 413)
    chunk = b"%x\r\n" % 2**14 + b" " * 2**14 + b"\r\n"
    lines = (f"Content-Type: {JSON}", "Transfer-Encoding: chunked")
    assert_form(raw(address, head("POST", GENERATIONS, *lines) + 5 * chunk), 413)
    told = head("POST", EDITS, f"Content-Type: {FORM}", f"Content-Length: {2**40}")
    start = time.monotonic()
    assert_form(raw(address, told + b"--b"), 408)
    assert 0.5 < time.monotonic() - start < 5
    monkey = guard.MOST_HELD
    try:
        guard.MOST_HELD = 1000
        found = raw(address, post(EDITS, form({"image": bytes(2000)}), FORM))
        assert_form(found, 429)
        assert int(found[1]["retry-after"]) >= 1
    finally:
        guard.MOST_HELD = monkey
    assert raw(address, head("GET", "/healthz"))[0] == 200


# --- pictures -------------------------------------------------------------------------------------


def test_the_size_is_looked_at_before_pixels(address, monkeypatch):
    from PIL import Image, PngImagePlugin

    file = io.BytesIO()
    Image.fromarray(np.zeros((4096, 4096), np.uint16)).save(file, format="PNG")
    files = small_files() | {"image": file.getvalue()}
    assert len(files["image"]) < 2**18
    load = lambda self: pytest.fail("decoded")  # noqa: E731
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
    start = time.monotonic()
    assert_form(raw(address, post(EDITS, form(files, [("class", "1")]), FORM)), 422, "image")
    assert time.monotonic() - start < 5
