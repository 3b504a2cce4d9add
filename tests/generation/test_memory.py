import pytest

import varjax
from tests.models_under_test import checkpoint_folder
from varjax import Generator
from varjax.core.errors import UserError
from varjax.generation import api, build, memory
from varjax.generation.build import Build
from varjax.generation.pixels import Decoding
from varjax.models.loading import describe

ONE = Decoding(at_once=1)


def linear(size):
    return memory.Prediction(weights=100, kv_pool=10 * size, activations=5 * size)


def test_largest_batch():
    assert memory.largest_batch(linear, 50, int(250 / memory.SAFETY) + 1) == 10
    assert memory.largest_batch(linear, 5, 10**9) == 5
    assert memory.largest_batch(linear, 5, 50) == 0
    assert memory.largest_batch(linear, 5, None) == 5


def test_choose_batch_size(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: int(250 / memory.SAFETY) + 1)
    assert memory.choose_batch_size(linear, None, 100, 8) == 8
    assert memory.choose_batch_size(linear, None, 3, 8) == 3
    assert memory.choose_batch_size(linear, None, 100, 64) == 10  # cut down to what fits
    with pytest.raises(UserError, match="largest batch that fits is 10"):
        memory.choose_batch_size(linear, 11, 100, 8)
    monkeypatch.setattr(memory, "available_bytes", lambda: 50)
    with pytest.raises(UserError, match="a batch of 1 needs"):
        memory.choose_batch_size(linear, None, 100, 8)


@pytest.mark.parametrize(
    ("asked", "available", "found"),
    [
        ("auto", 110, "auto"),  # both fit
        ("auto", 105, "scan"),
        ("auto", 95, "auto"),  # neither does: the faster one, which is refused with its own bytes
        ("auto", None, "auto"),
        ("unroll", 105, "unroll"),
        ("scan", 110, "scan"),
    ],
)
def test_layers_that_fit(asked, available, found):
    def predict_for(layers):
        return memory.Prediction(
            weights={"scan": 100, "unroll": 110}[layers], kv_pool=0, activations=0
        )

    there = available and available / memory.SAFETY
    assert memory.layers_that_fit(asked, predict_for, there) == found


def test_a_generator_scans_where_separate_layers_do_not_fit(monkeypatch):
    monkeypatch.setattr(build, "SCANNED_BYTES", 0)  # no model is small
    model = varjax.load(checkpoint_folder("c_k5_nol2norm"), "float32")
    generator = Generator(model, batch_size=2)
    assert generator.layers == "unroll"
    scan, separate = (
        memory.predict(model, generator.plan, 2, "float32", "float32", layers=layers).total
        for layers in ("scan", "unroll")
    )
    assert scan < separate
    monkeypatch.setattr(memory, "device_bytes", lambda: (scan + separate) / 2 / memory.SAFETY)
    assert Generator(model, batch_size=2).layers == "scan"
    assert Generator(model, batch_size=2, build=Build(layers="unroll")).layers == "unroll"


def test_a_window_of_queries_takes_memory_even_with_kernels():
    """Its scores, and the keys that they are made from, are in no kernel."""
    model = describe("var-d30")
    full, window = (api.plan(model, name, 0.5) for name in ("swa", "snapkv"))
    looks = api.plan(model, varjax.policies.SnapKV(budget=0.5, window=64))
    sizes = (64, "bfloat16", "bfloat16")
    few, some, many = (
        memory.predict(model, plan, *sizes, kernels=True, decoding=ONE).activations
        for plan in (full, window, looks)
    )
    assert few <= some < many


@pytest.mark.parametrize("name", ["var-d16", "llamagen-b-256"])
def test_pixels_are_decoded_where_the_cache_was(name, monkeypatch):
    """The program that takes more counts, not parts of both."""
    model = describe(name)
    plan = api.plan(model, "full")
    sizes = (8, "bfloat16", "bfloat16")

    def predicted(pixels):
        monkeypatch.setattr(Decoding, "image_bytes", lambda *_: pixels)
        return memory.predict(model, plan, *sizes, kernels=True, decoding=ONE)

    drawn = predicted(1)
    assert predicted(drawn.kv_pool).total == drawn.total
    large = drawn.total + 1
    assert predicted(large).total == drawn.weights + large
