"""The API over HTTP: pictures equal `run`'s, wrong requests have clear answers."""

import base64
import contextlib
import io
import socket
import threading
import time
import types

import numpy as np
import pytest
from PIL import Image

from tests import models_under_test as models
from tests.serve.server import (
    BUDGET,
    MODEL,
    POLICY,
    FakeDrawer,
    batcher_of,
    running,
    small_drawer,
)
from varjax.generator import Generator
from varjax.io import pictures
from varjax.io.images import to_uint8
from varjax.models.labels import Labels
from varjax.models.transformer import _images_to_tokens

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("python_multipart", reason="needs the extra serve")
httpx = pytest.importorskip("httpx", reason="needs httpx, of the extra dev")

from experiments.serve.api import Service, make_app  # noqa: E402
from experiments.serve.drawer import Patch, encode_once  # noqa: E402
from experiments.serve.subjects import subjects  # noqa: E402

KEY = "of-the-tests"


@pytest.fixture(scope="module")
def service():
    drawer = small_drawer()
    batcher = batcher_of(drawer, most=6)
    return Service(
        model=drawer.model,
        subjects=subjects(drawer.model),
        batcher=batcher,
        metrics=batcher.metrics,
        api_key=KEY,
        body_seconds=2.0,
        drain_seconds=10.0,
    )


@pytest.fixture(scope="module")
def address(service):
    with running(make_app(service)) as address:
        yield address


@pytest.fixture
def client(address):
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=address, headers=key, timeout=120, trust_env=False) as client:
        yield client


def drawn(labels, seed):
    """What `experiments.run` draws."""
    model = models.fixture_model(MODEL)
    generator = Generator(model, POLICY, BUDGET, batch_size=len(labels), segments=1)
    condition = Labels.of(labels, model.num_classes)
    return to_uint8(
        np.concatenate([r["images"] for _, r in generator.batches(condition, seed=seed)])
    )


def pictures_of(answer):
    assert answer.status_code == 200, answer.text
    data = [base64.b64decode(entry["b64_json"]) for entry in answer.json()["data"]]
    return np.stack([np.asarray(Image.open(io.BytesIO(one))) for one in data])


def close(found, expected):
    """Programs of other batch sizes may round a float differently, so a byte may be off by one."""
    return (np.abs(found.astype(int) - expected) <= 1).all()


def test_pictures_are_those_of_run(client):
    """Also of requests that are drawn together, whatever their seeds and neighbours."""
    found = {}

    def ask(seed, label, n):
        body = {"class": label, "seed": seed, "n": n}
        found[seed] = pictures_of(client.post("/v1/images/generations", json=body))

    asked = [(5, 1, 3), (6, 2, 1), (7, 1, 2)]
    threads = [threading.Thread(target=ask, args=one) for one in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, label, n in asked:
        assert close(found[seed], drawn([label] * n, seed))
    answer = client.post("/v1/images/generations", json={"prompt": "1"}).json()
    again = {"prompt": "1", "seed": answer["data"][0]["seed"]}
    again = client.post("/v1/images/generations", json=again).json()
    assert again["data"] == answer["data"] and isinstance(answer["created"], int)


def test_pictures_of_a_request_are_those_drawn_one_by_one(client):
    """n = 3: picture i is what a generator of single images draws for number i of that seed."""
    model = models.fixture_model(MODEL)
    body = {"class": 3, "seed": 11, "n": 3}
    found = pictures_of(client.post("/v1/images/generations", json=body))
    alone = Generator(model, POLICY, BUDGET, batch_size=1, segments=1)
    condition = Labels.of([3] * 3, model.num_classes)
    singles = [alone.draw(condition, np.array([i]), seed=11)["images"][0] for i in range(3)]
    assert close(found, to_uint8(np.stack(singles)))
    assert (found[0] != found[1]).any() and (found[1] != found[2]).any()
    body["n"] = 1
    assert close(pictures_of(client.post("/v1/images/generations", json=body)), found[:1])


def edit_files(drawn=None, kind="PNG"):
    height, width = models.fixture_model(MODEL).pixels
    rows = np.linspace(0, 255, height).astype(np.uint8)
    picture = np.ascontiguousarray(np.broadcast_to(rows[:, None, None], (height, width, 3)))
    if drawn is None:
        drawn = np.zeros((height, width), np.uint8)
        drawn[height // 2 :] = 255
    files = {"image": pictures.png(picture), "mask": pictures.png(drawn)}
    return picture, {name: (f"../../{name}", data, "image/png") for name, data in files.items()}


def test_edits(client):
    picture, files = edit_files()
    answer = client.post(
        "/v1/images/edits", files=files, data={"class": "1", "seed": "5", "n": "2"}
    )
    found, half = pictures_of(answer), len(picture) // 2
    assert (found[:, :half] == picture[:half]).all() and (found[:, half:] != picture[half:]).any()
    assert (found[0] != found[1]).any()
    data = {"class": "1", "seed": "5", "paste": "false"}
    loose = pictures_of(client.post("/v1/images/edits", files=files, data=data))
    assert (loose[0, :half] != picture[:half]).any()
    assert close(loose[0, half:], found[0, half:])


def test_health_models_metrics(client, address):
    assert httpx.get(f"{address}/healthz", trust_env=False).json() == {"status": "ok"}
    found = client.get("/v1/models").json()["data"]
    assert found[0]["object"] == "model"
    assert client.get(f"/v1/models/{found[0]['id']}").json() == found[0]
    assert client.get("/v1/models/other").status_code == 404
    client.post("/v1/images/generations", content=b"{")
    text = httpx.get(f"{address}/metrics", trust_env=False).text
    assert "varjax_queue_limit 6\n" in text and 'path="/healthz",status="200"' in text
    assert 'path="/v1/images/generations",status="400"' in text
    families = pytest.importorskip("prometheus_client.parser", reason="needs prometheus_client")
    assert list(families.text_string_to_metric_families(text))


def assert_refused(answer, status, param=None):
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert error["message"] and error["type"] and error["param"] == param
    assert "Traceback" not in answer.text and len(answer.text) < 2000


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"content": b"{"}, 400, None),
        ({"json": {"prompt": "no such class"}}, 422, "prompt"),
        ({"json": {"prompt": "<script>alert(1)</script>"}}, 422, "prompt"),
        ({"json": {"class": 10**6}}, 422, "class"),
        ({"json": {"class": 1, "n": 7}}, 422, "n"),
        ({"json": {"class": 1, "size": "1x1"}}, 422, "size"),
        ({"content": b"x" * 10_000_000}, 413, None),
        ({"content": iter([b"x" * 2**16] * 3)}, 413, None),
        ({"data": {"prompt": "1"}}, 400, None),
        ({"content": b'{"prompt": "1", "prompt": "2"}'}, 400, None),
        ({"content": b'{"\\ud800": 1, "prompt": "1"}'}, 422, "?"),  # half a character
    ],
    ids=range(11),  # texts of bodies differ between processes
)
def test_wrong_requests(client, body, status, param):
    assert_refused(client.post("/v1/images/generations", **body), status, param)


def test_wrong_edits(client):
    height, width = models.fixture_model(MODEL).pixels
    _, files = edit_files()
    post = lambda f, **data: client.post(  # noqa: E731
        "/v1/images/edits", files=f, data={"class": "1"} | data
    )
    for level in (0, 255, 128):  # empty, full, grey
        _, some = edit_files(np.full((height, width), level, np.uint8))
        assert_refused(post(some), 422, "mask")
    dot = np.zeros((height, width), np.uint8)
    dot[0, 0] = 255  # no token lies in it by half
    assert_refused(post(edit_files(dot)[1]), 422, "mask")
    _, small = edit_files(np.zeros((height - 1, width), np.uint8))
    assert_refused(post(small), 422, "mask")
    text = ("a.png", b"no picture", "image/png")
    assert_refused(post(files | {"image": text}), 422, "image")
    assert_refused(post({"image": files["image"]}), 422, "mask")
    assert_refused(post(files, n="x"), 422, "n")
    assert_refused(client.post("/v1/images/edits", json={"prompt": "1"}), 400)
    assert_refused(post(files | {"image": ("a.png", bytes(2**24 + 1), "image/png")}), 413)
    pair = [(f"image{end}", files["image"]) for end in ("[]", "[]")]
    twice = client.post("/v1/images/edits", files=[*pair, ("mask", files["mask"])])
    assert_refused(twice, 400, "image")
    twice = client.post("/v1/images/edits", files=[("image", files["image"]), *pair[:1]])
    assert_refused(twice, 400, "image")
    assert_refused(post(files, prompt=["1", "2"]), 400, "prompt")
    broken = {"Content-Type": "multipart/form-data; boundary=a"}
    assert_refused(client.post("/v1/images/edits", content=b"--b\r\n", headers=broken), 400)


def test_keys_paths_methods(client, address):
    for key in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic \xff"}):
        headers = {name: value.encode("latin-1") for name, value in key.items()}
        answer = httpx.get(f"{address}/v1/models", headers=headers, trust_env=False)
        assert_refused(answer, 401)
    assert_refused(client.get("/v1/nothing"), 404)
    assert_refused(client.get("/v1/images/generations"), 405)


def test_a_body_that_does_not_come(client):
    def slowly():
        yield b"{"
        time.sleep(4)

    assert_refused(client.post("/v1/images/generations", content=slowly()), 408)


@contextlib.contextmanager
def busy(service):
    """Nothing is drawn meanwhile."""
    gate = threading.Event()
    hold = service.batcher.run(gate.wait)
    try:
        yield
    finally:
        gate.set()
        hold.result(30)


def wait_until(true):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_queue(client, service):
    """All are refused or drawn; who is refused is told when to come again."""
    answers = []
    body = {"class": 1, "n": 4}
    ask = lambda: answers.append(client.post("/v1/images/generations", json=body))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(6)]
    with busy(service):
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) == 5)  # one waits
    for thread in threads:
        thread.join()
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 5 and all(int(a.headers["retry-after"]) >= 1 for a in refused)
    assert_refused(refused[0], 429)
    assert sum(answer.status_code == 200 for answer in answers) == 1


def test_who_is_refused_costs_nothing(client, service, monkeypatch):
    """With a full queue no picture is decoded, and no place is lost when one is none."""
    _, files = edit_files()
    read = pictures.read_picture
    with busy(service), service.batcher.reserve(5) as places:
        monkeypatch.setattr(pictures, "read_picture", lambda *a, **k: pytest.fail("decoded"))
        answer = client.post("/v1/images/edits", files=files, data={"class": "1", "n": "2"})
        assert_refused(answer, 429)
        monkeypatch.setattr(pictures, "read_picture", read)
        text = {"image": ("a.png", b"no picture", "image/png")}
        for _ in range(3):
            assert_refused(
                client.post("/v1/images/edits", files=files | text, data={"class": "1"}),
                422,
                "image",
            )
        assert service.batcher.depth == 5
    del places
    wait_until(lambda: service.batcher.depth == 0)


def test_a_client_that_vanishes_in_its_body(client, service, address):
    """Nothing is drawn for it, nothing fails, and the server goes on."""
    host, port = address.removeprefix("http://").split(":")
    head = f"Host: {host}\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 500\r\n"
    form = "Content-Type: multipart/form-data; boundary=b\r\n"
    for path, more in (("generations", ""), ("edits", form)):
        with socket.create_connection((host, int(port))) as gone:
            start = f"POST /v1/images/{path} HTTP/1.1\r\n{head}{more}\r\n--b"
            gone.sendall(start.encode())
            time.sleep(0.1)
        label = f'path="/v1/images/{path}",status="408"'
        wait_until(lambda label=label: label in client.get("/metrics").text)
    assert 'status="500"' not in client.get("/metrics").text
    assert service.batcher.depth == 0
    assert len(pictures_of(client.post("/v1/images/generations", json={"class": 1}))) == 1


def test_what_is_not_drawn_in_time_at_the_end():
    """Requests that wait longer than the end may take get 503 in OpenAI's form."""
    drawer = FakeDrawer()
    drawer.go.clear()
    batcher, model = batcher_of(drawer), models.fixture_model(MODEL)
    service = Service(
        model=model,
        subjects=subjects(model),
        batcher=batcher,
        metrics=batcher.metrics,
        drain_seconds=1.0,
    )
    answers = []
    with running(make_app(service), seconds=1) as address:
        url = f"{address}/v1/images/generations"

        def ask():
            answers.append(httpx.post(url, json={"class": 1}, timeout=60, trust_env=False))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: batcher.depth + drawer.drawing == 3)
    for thread in threads:
        thread.join(30)
    drawer.go.set()
    assert len(answers) == 3
    for answer in answers:
        assert_refused(answer, 503)
        assert int(answer.headers["retry-after"]) >= 1


def test_the_first_edit_compiles_no_encoder():
    """Encoding a picture is compiled when the server starts."""
    model = models.fixture_model(MODEL)
    encode_once(model)
    before = _images_to_tokens._cache_size()
    picture, _ = edit_files()
    drawn = np.zeros(model.pixels, bool)
    drawn[model.pixels[0] // 2 :] = True
    Patch.of(model, picture, drawn, True)
    assert _images_to_tokens._cache_size() == before > 0
    said = []
    drawer = small_drawer((1,))
    drawer.generators = {1: types.SimpleNamespace(run_batch=lambda *a, **k: None)}
    drawer.compile(said.append)
    assert [line.split(":")[0] for line in said] == ["pictures to tokens", "batches of 1"]


def test_a_client_that_goes_away(client, service):
    with busy(service):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/images/generations", json={"class": 1, "n": 5}, timeout=0.5)
        waiting = service.batcher._waiting  # its images make room
        wait_until(lambda: all(one.future.cancelled() for one in waiting))
    body = {"class": 2, "seed": 3}
    found = pictures_of(client.post("/v1/images/generations", json=body))
    assert close(found, drawn([2], 3))


def test_openai_client(address):
    openai = pytest.importorskip("openai", reason="needs openai, of the extra dev")
    http = httpx.Client(trust_env=False)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, http_client=http, max_retries=0)
    model = client.models.list().data[0]
    found = client.images.generate(
        prompt="1", model=model.id, n=2, response_format="b64_json", extra_body={"seed": 5}
    )
    data = [base64.b64decode(image.b64_json) for image in found.data]
    assert close(np.stack([np.asarray(Image.open(io.BytesIO(d))) for d in data]), drawn([1, 1], 5))
    picture, files = edit_files()
    streams = {name: (name, io.BytesIO(data), kind) for name, (_, data, kind) in files.items()}
    edited = client.images.edit(prompt="1", **streams)
    assert len(edited.data) == 1
    with pytest.raises(openai.UnprocessableEntityError, match="no class"):
        client.images.generate(prompt="no such thing")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", http_client=http).models.list()
