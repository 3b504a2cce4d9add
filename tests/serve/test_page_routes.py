"""The page over HTTP, without a browser: limits, the key, old files, what it offers and hides."""

import contextlib
import json
import time
import types

import numpy as np
import pytest

from tests import models_under_test as models
from tests.serve.server import batcher_of, running, small_drawer
from varjax.io import pictures

pytest.importorskip("gradio", reason="needs the extra serve")
httpx = pytest.importorskip("httpx", reason="needs httpx, of the extra dev")

from experiments.serve import page as page_lib  # noqa: E402
from experiments.serve import typed  # noqa: E402
from experiments.serve.api import Service, make_app  # noqa: E402
from experiments.serve.guard import MOST_FILE, MOST_PAGE, UPLOAD, most_bytes  # noqa: E402
from experiments.serve.studio import Studio  # noqa: E402
from experiments.serve.subjects import subjects  # noqa: E402

KEY = "of-the-tests"


class NoGenerator:
    """What these tests do not draw with."""

    def __init__(self, *args, **more):
        pass


def service_of(drawer, key=None):
    batcher = batcher_of(drawer)
    return Service(
        model=drawer.model,
        subjects=subjects(drawer.model),
        batcher=batcher,
        metrics=batcher.metrics,
        api_key=key,
        body_seconds=10.0,
        drain_seconds=5.0,
    )


@pytest.fixture(scope="module")
def drawer():
    return small_drawer(sizes=(1,))


@contextlib.contextmanager
def page(drawer, key=None):
    """A client of a page, whose files are soon old."""
    service = service_of(drawer, key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_lib, "CACHE", (1, 1))
        app = page_lib.mount(make_app(service), service, NoGenerator)
    with running(app) as address:
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
            yield client


@pytest.fixture(scope="module")
def client(drawer):
    with page(drawer) as client:
        yield client


@pytest.fixture
def guarded(drawer):
    with page(drawer, KEY) as client:
        yield client


def upload(client, data):
    return client.post("/gradio_api/upload", files={"files": ("a.png", data, "image/png")})


def test_uploads(client):
    """Too large ones are refused, told or not; the server goes on, and forgets old files."""
    head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    for path, most in (("upload", MOST_FILE), ("queue/join", MOST_PAGE)):
        for body in (head + bytes(2 * most), iter([head, *[bytes(2**20)] * (2 * most // 2**20)])):
            answer = client.post(f"/gradio_api/{path}", content=body, headers=kind)
            assert answer.status_code == 413, path
            assert answer.json()["error"]["type"] == "request_too_large"
    for more in (most_bytes(UPLOAD) - MOST_FILE - 2**10, most_bytes(UPLOAD) - MOST_FILE):
        answer = upload(client, bytes(MOST_FILE + more))  # the guard counts what is around the file
        assert answer.status_code == 200 or answer.json()["error"]["type"] == "request_too_large"
    picture = pictures.png(np.zeros((8, 8, 3), np.uint8))
    answer = upload(client, picture)
    assert answer.status_code == 200
    path = answer.json()[0]
    assert client.get(f"/gradio_api/file={path}").content == picture
    end = time.monotonic() + 30
    while client.get(f"/gradio_api/file={path}").status_code == 200:
        assert time.monotonic() < end, "old files stay"
        time.sleep(0.2)


def test_what_is_no_page(client):
    for path in ("/openapi.json", "/docs", "/redoc", "/v1/nothing", "/gradio_api/openapi.json"):
        answer = client.get(path)
        assert answer.status_code == 404 and answer.json()["error"]["message"]
    assert client.get("/").status_code == 200


def test_methods(client):
    """In OpenAI's form, not in the words of the page behind it."""
    for path, allowed in (
        ("/healthz", "GET"),
        ("/metrics", "GET"),
        ("/v1/models", "GET"),
        ("/v1/models/other", "GET"),
        ("/v1/images/generations", "POST"),
        ("/v1/images/edits", "POST"),
    ):
        for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "BREW"):
            answer = client.request(method, path)
            assert answer.status_code == 405 and answer.headers["allow"] == allowed
            assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_key_guards_every_route(guarded):
    client = guarded
    for method, path in (
        ("GET", "/"),
        ("GET", "/config"),
        ("GET", "/theme.css"),
        ("GET", "/assets/index.js"),
        ("GET", "/gradio_api/info"),
        ("GET", "/gradio_api/heartbeat/a"),
        ("POST", "/gradio_api/upload"),
        ("POST", "/gradio_api/queue/join"),
        ("POST", "/gradio_api/cancel"),
        ("POST", "/gradio_api/reset"),
        ("POST", "/login"),
    ):
        answer = client.request(method, path)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Basic")
    assert client.get("/", auth=("anybody", KEY)).status_code == 200
    assert client.get("/config", auth=("", KEY)).status_code == 200
    assert client.get("/", auth=("anybody", "other")).status_code == 401
    assert client.get("/healthz").status_code == 200


def events(client, number, data):
    """What an event of the page sends back, as text, until it is over."""
    body = {"data": data, "fn_index": number, "session_hash": "abc"}
    assert client.post("/gradio_api/queue/join", json=body).status_code == 200
    found = []
    with client.stream("GET", "/gradio_api/queue/data?session_hash=abc") as answer:
        for line in answer.iter_lines():
            found.append(line)
            if '"process_completed"' in line:
                break
    return "\n".join(found)


def test_internals_are_not_shown(client, monkeypatch):
    """A bug is none of a visitor's; what a visitor can help is told, escaped."""
    config = client.get("/config").json()
    draw = next(d for d in config["dependencies"] if d["api_name"] == "job")
    values = {c["id"]: c["props"].get("value") for c in config["components"]}
    data = [values[number] for number in draw["inputs"]]
    data[0], data[1] = "<b>no class</b>", "7"
    told = events(client, draw["id"], data)
    assert "there is no class" in told and "&lt;b&gt;" in told and "<b>" not in told

    def bug(text):
        raise RuntimeError("/secret/place")

    monkeypatch.setattr(typed, "seed", bug)
    data[0] = "1"
    told = events(client, draw["id"], data)
    assert json.loads(told.rsplit("data: ", 1)[1])["success"] is False
    assert "secret" not in told and "Traceback" not in told


def test_policies_that_the_model_can_have(drawer):
    """Those of models that draw token by token are not offered here, and the other way round."""
    studio = Studio(service_of(drawer), NoGenerator)
    offered = studio.offered(0.6)
    assert {"full", "streaming", "h2o"} <= set(offered)
    assert not {"linear", "rkv", "diagonal", "table", "compose"} & set(offered)
    tokens = types.SimpleNamespace(model=models.fixture_model("llamagen_c2i"))
    assert {"full", "linear", "rkv"} <= set(Studio(tokens, NoGenerator).offered(0.6))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((64, 64), ""),
        ((128, 128), "it was resized"),
        ((96, 60), "its middle was cut out and resized"),
    ],
)
def test_what_was_done_to_a_picture_is_told(given, words):
    from PIL import Image

    canvas = {"background": Image.new("RGB", given[::-1], "red"), "layers": []}
    picture, drawn, told = typed.canvas(canvas, typed.LOWER, (64, 64))
    assert picture.shape == (64, 64, 3) and drawn[32:].all() and not drawn[:32].any()
    assert words in told and bool(told) == bool(words)
