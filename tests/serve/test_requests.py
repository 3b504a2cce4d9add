"""Requests, field by field."""

import pytest

from experiments.serve import requests
from experiments.serve.requests import BadRequest, Limits
from experiments.serve.subjects import Classes
from tests import models_under_test as models
from varjax.errors import UserError

LIMITS = Limits("demo", (64, 96), 8)


def test_what_clients_of_openai_send():
    fields = {"prompt": "kiwi", "model": "demo", "n": 2, "size": "96x64", "quality": "hd"}
    found = requests.check(fields | {"response_format": "b64_json", "user": "me"}, LIMITS)
    assert (found.prompt, found.n, found.label) == ("kiwi", 2, None)
    assert 0 <= found.seed < 2**31
    same = requests.check({"class": 3, "seed": 5, "size": "auto", "n": None}, LIMITS)
    assert (same.label, same.seed, same.n) == (3, 5, 1)
    form = {"prompt": "kiwi", "n": "2", "seed": "5", "paste": "false"}
    found = requests.check(requests.parse_form(form), LIMITS, edit=True)
    assert (found.n, found.seed, found.paste) == (2, 5, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["kiwi"]}, "prompt"),
        ({"prompt": "a" * 4001}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 9}, "n"),
        ({"prompt": "a", "n": "2"}, "n"),
        ({"prompt": "a", "n": 1.5}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "n": 10**400}, "n"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "seed": 2**31}, "seed"),
        ({"prompt": "a", "size": "64x96"}, "size"),
        ({"prompt": "a", "size": {}}, "size"),
        ({"prompt": "a", "model": "dall-e-3"}, "model"),
        ({"prompt": "a", "response_format": "url"}, "response_format"),
        ({"class": "3"}, "class"),
        ({"class": None}, "prompt"),
        ({"prompt": "a", "promt": "b"}, "promt"),
        ({"prompt": "a", "paste": True}, "paste"),
    ],
)
def test_wrong_fields(fields, param):
    with pytest.raises(BadRequest) as error:
        requests.check(fields, LIMITS)
    assert error.value.status == 422 and error.value.param == param and error.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"nul", b"[" * 100_000, b"3"])
def test_what_is_no_json(body):
    with pytest.raises(BadRequest) as error:
        requests.parse_json(body)
    assert error.value.status == 400


def test_classes_by_name():
    model = models.fixture_model("c_k5_nol2norm")
    classes = Classes(model)
    classes.names = ["kiwi", "apple red"]
    classes._numbers = {"kiwi": 0, "apple red": 1}
    assert [classes.label(p) for p in ("kiwi", " Apple  RED ", "1")] == [0, 1, 1]
    assert classes.of(None, 1).tolist() == classes.of("1", None).tolist() == [1]
    with pytest.raises(UserError, match="near it are 'apple red'"):
        classes.label("appel red")
    for prompt, label in ((None, None), ("kiwi", 1), (None, 10**6), ("99999", None)):
        with pytest.raises(UserError):
            classes.of(prompt, label)
