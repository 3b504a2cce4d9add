"""The API over HTTP: pictures equal `run`'s, wrong requests have clear answers, events come."""

import base64
import io
import json
import socket
import threading
import time

import numpy as np
import pytest
from PIL import Image

from tests import models_under_test as models
from tests.serve.server import (
    BUDGET,
    KEY,
    MODEL,
    POLICY,
    busy,
    close,
    edit_files,
    pictures_of,
    programs_of,
    running,
    service_of,
    wait_until,
)
from varjax.generation.kept import at_the_end
from varjax.models.labels import Labels
from varjax.policies import get_policy
from varjax.storage.pictures import to_uint8

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("python_multipart", reason="needs the extra serve")
httpx = pytest.importorskip("httpx", reason="needs httpx, of the extra dev")

from experiments.serve.api import make_app  # noqa: E402
from experiments.serve.guard import EDITS, GENERATIONS, Rules  # noqa: E402


@pytest.fixture(scope="module")
def service():
    programs = programs_of(models.fixture_model(MODEL))
    programs.compile()
    return service_of(programs, rules=Rules(key=KEY, body_seconds=2.0))


@pytest.fixture(scope="module")
def address(service):
    with running(make_app(service)) as address:
        while service.programs.largest < 2:  # larger batches follow
            time.sleep(0.05)
        yield address


@pytest.fixture
def client(address):
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=address, headers=key, timeout=120, trust_env=False) as client:
        yield client


def drawn(labels, seed):
    """What `experiments.run` draws."""
    model = models.fixture_model(MODEL)
    generator = models.built(model, POLICY, BUDGET, batch_size=len(labels), segments=1)
    condition = Labels.of(labels, model.num_classes)
    return to_uint8(
        np.concatenate([r["images"] for _, r in generator.batches(condition, seed=seed)])
    )


def test_pictures_are_those_of_run(client):
    """Also of requests that are drawn together, whatever their seeds and neighbours."""
    found = {}

    def ask(seed, label, n):
        body = {"class": label, "seed": seed, "n": n}
        found[seed] = pictures_of(client.post(GENERATIONS, json=body))

    asked = [(5, 1, 3), (6, 2, 1), (7, 1, 2)]
    threads = [threading.Thread(target=ask, args=one) for one in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, label, n in asked:
        assert close(found[seed], drawn([label] * n, seed))
    answer = client.post(GENERATIONS, json={"prompt": "1"}).json()
    again = {"prompt": "1", "seed": answer["data"][0]["seed"]}
    again = client.post(GENERATIONS, json=again).json()
    assert again["data"] == answer["data"] and isinstance(answer["created"], int)


def test_edits(client):
    picture, files = edit_files()
    answer = client.post(EDITS, files=files, data={"class": "1", "seed": "5", "n": "2"})
    found, half = pictures_of(answer), len(picture) // 2
    assert (found[:, :half] == picture[:half]).all() and (found[:, half:] != picture[half:]).any()
    assert (found[0] != found[1]).any()
    data = {"class": "1", "seed": "5", "paste": "false"}
    loose = pictures_of(client.post(EDITS, files=files, data=data))
    assert (loose[0, :half] != picture[:half]).any()
    assert close(loose[0, half:], found[0, half:])


# --- policies -------------------------------------------------------------------------------------


def test_a_policy_of_a_request(client, service):
    """Its picture is `run`'s with that policy; the answer says what was done and what it took."""
    model = models.fixture_model(MODEL)
    usual = client.post(GENERATIONS, json={"class": 1, "seed": 5}).json()
    body = {"class": 1, "seed": 5, "policy": "h2o", "budget": 0.7}
    body |= {"policy_args": {"recent_share": 0.4}, "kept": True, "tokens": True}
    answer = client.post(GENERATIONS, json=body)
    found = answer.json()
    policy = get_policy("h2o", 0.7, {"recent_share": "0.4"})
    generator = models.built(model, policy, batch_size=1, segments=1, keep_contents=True)
    arrays, index = models.arrays_of(model, [1]), np.zeros(1, np.int32)
    results, _ = generator.run_batch(arrays, index, seed=5)
    assert close(pictures_of(answer)[0], to_uint8(np.asarray(results["images"]))[0])
    plan, dtype = generator.plan, generator.kv_dtype
    told = {name: found[name] for name in ("policy", "budget", "kv_bytes", "dense_bytes")}
    one = plan.num_bytes(1, dtype), plan.dense_bytes(1, dtype)
    assert list(told.values()) == ["h2o", 0.7, *one]
    assert found["policy_args"] == {"recent_share": 0.4} and found["seconds"] > 0
    assert (usual["policy"], usual["budget"], usual["policy_args"]) == (POLICY, BUDGET, {})
    assert usual["kv_bytes"] != found["kv_bytes"] and usual["dense_bytes"] == found["dense_bytes"]
    # what heads kept, and the tokens
    kept = found["data"][0]["kept"]
    bits = np.unpackbits(np.frombuffer(base64.b64decode(kept["b64"]), np.uint8))
    shape = kept["layers"], kept["heads"], kept["tokens"]
    expected = at_the_end(plan, results["contents"])
    np.testing.assert_array_equal(bits[: np.prod(shape)].reshape(shape), expected)
    tokens = found["data"][0]["tokens"]
    numbers = np.frombuffer(base64.b64decode(tokens["b64"]), "<i4").reshape(tokens["shape"])
    np.testing.assert_array_equal(numbers, np.asarray(results["tokens"])[0])


# --- events ---------------------------------------------------------------------------------------


def events_of(client, body, path=GENERATIONS, **more):
    """The events of an answer, and its comments."""
    given = {"json": body | {"stream": True}} if path == GENERATIONS else {"data": body, **more}
    found, comments = [], []
    with client.stream("POST", path, **given) as answer:
        assert answer.status_code == 200 and "event-stream" in answer.headers["content-type"]
        for line in answer.iter_lines():
            if line.startswith(":"):
                comments.append(line)
            elif line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            elif line:
                name = line.removeprefix("event: ")
    assert name == found[-1].get("type", "error")
    return found, comments


def test_events(client):
    """A preview after every scale but the last, then the picture, which is that without events."""
    body = {"class": 1, "seed": 5, "n": 2}
    found, _ = events_of(client, body)
    scales = models.fixture_model(MODEL).config.schedule.num_scales
    kinds = [event["type"].removeprefix("image_generation.") for event in found]
    assert kinds == [*["partial_image"] * (scales - 1), "completed"] * 2
    one = [event for event in found if event["index"] == 0]
    assert [event["partial_image_index"] for event in one[:-1]] == list(range(scales - 1))
    assert one[0]["progress"] < one[1]["progress"] < 1 and "scale 2" in one[1]["says"]
    ends = [event for event in found if event["type"].endswith("completed")]
    whole = client.post(GENERATIONS, json=body).json()["data"]
    for end, expected in zip(ends, whole, strict=True):
        pair = [
            np.asarray(Image.open(io.BytesIO(base64.b64decode(e["b64_json"]))))
            for e in (end, expected)
        ]
        assert close(*pair) and end["seed"] == 5 and end["policy"] == POLICY
    few, _ = events_of(client, {"class": 1, "partial_images": 2})
    assert len(few) == 3


def test_what_goes_wrong_before_and_among_events(client, service, monkeypatch):
    """What is wrong with a request is no event; what happens later is the last one."""
    wrong = client.post(GENERATIONS, json={"class": 1, "stream": True, "policy": "nothing"})
    assert_refused(wrong, 422, "policy")
    assert_refused(client.post(GENERATIONS, json={"class": 1, "stream": 1}), 422, "stream")

    def fails(*_):
        raise RuntimeError("/secret/place")

    monkeypatch.setattr(type(service.programs), "draw", fails)
    found, _ = events_of(client, {"class": 1})
    assert found[-1]["error"]["type"] == "server_error" and "secret" not in str(found)


def test_a_client_that_goes_away(client, service):
    """Its pictures are not drawn, and its place is free again."""
    body = {"class": 1, "n": 5}
    with busy(service):
        with client.stream("POST", GENERATIONS, json=body | {"stream": True}) as answer:
            assert next(answer.iter_lines()).startswith(": waiting")
        wait_until(lambda: service.batcher.depth == 0)
        with pytest.raises(httpx.ReadTimeout):
            client.post(GENERATIONS, json=body, timeout=0.5)
        wait_until(lambda: service.batcher.depth == 0)
    assert len(pictures_of(client.post(GENERATIONS, json={"class": 1}))) == 1


# --- the rest -------------------------------------------------------------------------------------


def test_health_models_metrics(client, address):
    assert httpx.get(f"{address}/healthz", trust_env=False).json() == {"status": "ok"}
    found = client.get("/v1/models").json()["data"]
    assert found[0]["object"] == "model"
    assert client.get(f"/v1/models/{found[0]['id']}").json()["id"] == found[0]["id"]
    assert client.get("/v1/models/other").status_code == 404
    client.post(GENERATIONS, content=b"{", headers={"Content-Type": "application/json"})
    text = httpx.get(f"{address}/metrics", trust_env=False).text
    assert "varjax_queue_limit 6.0\n" in text and 'path="/healthz",status="200"' in text
    assert 'path="/v1/images/generations",status="400"' in text
    for name in ("images_total", "batches_total"):
        assert f"varjax_{name}" in text
    for name in ("queue_images", "largest_batch"):
        assert f"varjax_{name}" in text


def assert_refused(answer, status, param=None):
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert error["message"] and error["type"] and error["param"] == param, error
    assert "Traceback" not in answer.text and len(answer.text) < 2100


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"content": b'{"\\ud800": 1, "prompt": "1"}', "headers": JSON}, 400, None),
        ({"content": b'{"prompt": "1", "budget": NaN}', "headers": JSON}, 422, "budget"),
        ({"content": b'{"prompt": "1", "cfg": 1e999}', "headers": JSON}, 422, "cfg"),
        ({"json": {"prompt": "no such class"}}, 422, "prompt"),
        ({"json": {"prompt": "<script>alert(1)</script>"}}, 422, "prompt"),
        ({"json": {"class": 10**6}}, 422, "class"),
        ({"json": {"class": 1, "n": 7}}, 422, "n"),
        ({"json": {"class": 1, "size": "1x1"}}, 422, "size"),
        ({"json": {}}, 422, "prompt"),
        ({"json": {"prompt": 3}}, 422, "prompt"),
        ({"json": {"prompt": ""}}, 422, "prompt"),
        ({"json": {"prompt": "a" * 4001}}, 422, "prompt"),
        ({"json": {"prompt": "1", "class": 1}}, 422, "prompt"),
        ({"json": {"class": 1, "n": 0}}, 422, "n"),
        ({"json": {"class": 1, "n": 10**400}}, 422, "n"),
        ({"json": {"class": 1, "seed": -1}}, 422, "seed"),
        ({"json": {"class": 1, "model": "dall-e-3"}}, 422, "model"),
        ({"json": {"class": 1, "response_format": "url"}}, 422, "response_format"),
        ({"json": {"class": 1, "style": "vivid"}}, 422, "style"),
        ({"json": {"class": 1, "partial_images": -1}}, 422, "partial_images"),
        ({"json": {"class": 1, "promt": "b"}}, 422, "promt"),
        ({"json": {"class": 1, "paste": True}}, 422, "paste"),
    ],
    ids=range(22),  # texts of bodies differ between processes
)
def test_wrong_requests(client, body, status, param):
    assert_refused(client.post(GENERATIONS, **body), status, param)


def test_wrong_edits(client):
    height, width = models.fixture_model(MODEL).pixels
    _, files = edit_files()
    post = lambda f, **data: client.post(  # noqa: E731
        EDITS, files=f, data={"class": "1"} | data
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
    assert_refused(post(files, feather="3", paste="false"), 422, "feather")
    assert_refused(post(files, feather="65"), 422, "feather")
    assert_refused(client.post(EDITS, json={"prompt": "1"}), 415)
    assert_refused(post(files | {"image": ("a.png", bytes(2**24 + 1), "image/png")}), 413)
    pair = [(f"image{end}", files["image"]) for end in ("[]", "[]")]
    twice = client.post(EDITS, files=[*pair, ("mask", files["mask"])])
    assert_refused(twice, 400, "image")
    twice = client.post(EDITS, files=[("image", files["image"]), *pair[:1]])
    assert_refused(twice, 400, "image")
    assert_refused(post(files, prompt=["1", "2"]), 400, "prompt")
    broken = {"Content-Type": "multipart/form-data; boundary=a"}
    assert_refused(client.post(EDITS, content=b"--b\r\n", headers=broken), 400)


def test_a_client_that_vanishes_in_its_body(client, service, address):
    """Nothing is drawn for it, nothing fails, and the server goes on."""
    host, port = address.removeprefix("http://").split(":")
    head = f"Host: {host}\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 500\r\n"
    form = "Content-Type: multipart/form-data; boundary=b\r\n"
    kind = "Content-Type: application/json\r\n"
    for path, more, status in (("generations", kind, 400), ("edits", form, 408)):
        with socket.create_connection((host, int(port))) as gone:
            start = f"POST /v1/images/{path} HTTP/1.1\r\n{head}{more}\r\n--b"
            gone.sendall(start.encode())
            time.sleep(0.1)
        label = f'path="/v1/images/{path}",status="{status}"'
        wait_until(lambda label=label: label in client.get("/metrics").text)
    assert 'status="500"' not in client.get("/metrics").text
    assert service.batcher.depth == 0
    assert len(pictures_of(client.post(GENERATIONS, json={"class": 1}))) == 1


def test_what_is_not_drawn_in_time_at_the_end(service):
    """Requests that wait longer than the end may take get 503 in OpenAI's form; of events the last
    one says so."""
    programs, answers, lines = programs_of(models.fixture_model(MODEL)), [], []
    programs.own = programs.batches[1] = service.programs.own
    mine, gate = service_of(programs), threading.Event()
    with running(make_app(mine), seconds=1) as address:
        url = f"{address}{GENERATIONS}"

        def ask():
            answers.append(httpx.post(url, json={"class": 1}, timeout=60, trust_env=False))

        def listen():
            body = {"class": 1, "stream": True}
            with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as answer:
                lines.extend(answer.iter_lines())

        threads = [threading.Thread(target=what) for what in (ask, ask, listen)]
        programs._drawer.submit(gate.wait)
        for thread in threads:
            thread.start()
        wait_until(lambda: mine.batcher._taken == 3)
    for thread in threads:
        thread.join(30)
    gate.set()
    assert len(answers) == 2
    for answer in answers:
        assert_refused(answer, 503)
        assert int(answer.headers["retry-after"]) >= 1
    last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
    assert "the server ends" in last["error"]["message"] and "event: error" in lines


def test_openai_client(address):
    openai = pytest.importorskip("openai", reason="needs openai, of the extra dev")
    http = httpx.Client(trust_env=False)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, http_client=http, max_retries=0)
    usual = {"model": client.models.list().data[0].id, "size": "auto", "quality": "auto"}
    usual |= {"background": "auto", "moderation": "low", "user": "me", "output_format": "png"}
    found = client.images.generate(
        prompt="1", n=2, response_format="b64_json", extra_body={"seed": 5}, **usual
    )
    data = [base64.b64decode(image.b64_json) for image in found.data]
    assert close(np.stack([np.asarray(Image.open(io.BytesIO(d))) for d in data]), drawn([1, 1], 5))
    events = list(client.images.generate(prompt="1", stream=True, partial_images=2))
    assert len(events) == 3 and isinstance(events[-1], openai.types.ImageGenCompletedEvent)
    assert isinstance(events[0], openai.types.ImageGenPartialImageEvent)
    _, files = edit_files()
    streams = {name: (name, io.BytesIO(data), kind) for name, (_, data, kind) in files.items()}
    events = list(client.images.edit(prompt="1", stream=True, **streams))
    assert isinstance(events[-1], openai.types.ImageEditCompletedEvent)
    with pytest.raises(openai.UnprocessableEntityError, match="no class"):
        client.images.generate(prompt="no such thing")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", http_client=http).models.list()
