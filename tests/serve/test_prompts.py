"""Models that draw from text behind the API: a prompt's picture is that of a `Generator`."""

import dataclasses
import shutil
import time

import pytest

import varjax
from tests import models_under_test as models
from tests import prompt_models_under_test as small
from tests import text_encoder_under_test as encoder
from tests.often import often
from tests.serve.server import close, pictures_of, programs_of, service_of
from varjax.storage.pictures import to_uint8

pytest.importorskip("fastapi", reason="needs the extra serve")
testclient = pytest.importorskip("fastapi.testclient", reason="needs the extra serve")

from experiments.serve.api import make_app  # noqa: E402

POLICY, BUDGET = "streaming", 0.9
PROMPTS = ("a red apple", "two green pears")


def _folder(family, tmp_path):
    """A checkpoint that can read prompts."""
    folder = tmp_path / family
    if family != "infinity":
        return small.with_tokenizer(family, folder)
    shutil.copytree(models.checkpoint_folder("infinity_a"), folder)
    width = models.fixture_model("infinity_a").config.text_channels
    config = dataclasses.replace(encoder.CONFIG, d_model=width)
    encoder.write_folder(folder / "text_encoder", config)
    return folder


def _generator(model, size):
    segments = "auto" if model.draws_tokens else 1
    return models.built(model, POLICY, BUDGET, batch_size=size, segments=segments)


@pytest.fixture(scope="module", params=often((), ["infinity", *small.CONFIGS]))
def model(request, tmp_path_factory):
    return varjax.load(_folder(request.param, tmp_path_factory.mktemp("served")), "float32")


@pytest.fixture(scope="module")
def client(model):
    programs = programs_of(model, policy=POLICY, budget=BUDGET)
    programs.compile()
    # as clients beside it see it
    with testclient.TestClient(make_app(service_of(programs)), "http://localhost") as client:
        while programs.largest < 2:
            time.sleep(0.05)
        yield client


def test_a_prompts_pictures(model, client):
    """Whatever its length, so that any prompts share a batch; names of classes are none."""
    told = client.get("/v1/models").json()["data"][0]
    assert told["classes"] is None and told["examples"]
    generator = _generator(model, 2)
    for seed, prompt in enumerate(PROMPTS):
        body = {"prompt": prompt, "seed": seed, "n": 2}
        found = pictures_of(client.post("/v1/images/generations", json=body))
        expected = to_uint8(generator(prompts=[prompt] * 2, seed=seed))
        assert close(found, expected), prompt
        assert (found[0] != found[1]).any()


def test_a_class_is_no_prompt(client):
    answer = client.post("/v1/images/generations", json={"class": 1})
    error = answer.json()["error"]
    assert answer.status_code == 422 and error["param"] == "class", error
    assert "give prompt" in error["message"]
