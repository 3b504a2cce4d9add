"""The Python interface of models that draw from text, and what their programs take."""

import gc

import jax
import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.often import often
from varjax import Generator, conditions
from varjax.core.errors import UserError
from varjax.core.planner import plan_cache
from varjax.generation import memory
from varjax.generation.pixels import Decoding
from varjax.policies import Full, Streaming
from varjax.text.encoder import TextEncoder
from varjax.text.features import TextFeatures

NAME = models.FAMILIES["infinity"]


def features(count: int = 2):
    return models.condition(models.fixture_model(NAME), np.arange(count))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing given: .* draws from prompts or text_features"),
        ({"labels": [1]}, "labels given: .* draws from prompts or text_features"),
        ({"prompts": "a cat"}, "give a list of texts"),
        ({"prompts": [3]}, "give a list of texts"),
        ({"prompts": ["a cat"]}, "text_encoder"),
        ({"text_features": "x.npz"}, "give TextFeatures"),
        ({"prompts": ["a"], "text_features": features}, "prompts, text_features given"),
        ({"text_features": features, "cfg": [1.0, 2.0]}, "the schedule has 6 scales"),
        ({"text_features": features, "more_smooth": True}, "Infinity draws bits"),
        ({"text_features": features, "cfg_insertion_layer": [-9]}, "cfg_insertion_layer=-9"),
        ({"prompts": ["a cat"], "tau": 0.0}, "tau=0"),  # before the encoder is looked for
    ],
)
def test_what_cannot_work_is_said_before_compiling(given, message, monkeypatch):
    monkeypatch.setattr(Generator, "compile", lambda *_: pytest.fail("compiled"))
    given = {name: value() if callable(value) else value for name, value in given.items()}
    model, drawn = models.fixture_model(NAME), ("cfg", "tau", "cfg_insertion_layer", "more_smooth")
    overrides = {name: given.pop(name) for name in drawn if name in given}
    with pytest.raises(UserError, match=message):
        varjax.generate(model, **given, sampling=model.sampling(**overrides))


def test_another_shape_shares_the_weights():
    model = models.fixture_model("infinity_a")
    wide = model.with_template(0.5, "0.25M")
    assert wide.config.schedule.final_map == (23, 46)
    assert wide.transformer.head.kernel[...] is model.transformer.head.kernel[...]
    with pytest.raises(UserError, match="aspect and size: VAR draws"):
        models.fixture_model(models.FAMILIES["var"]).with_template(0.5, None)


def test_text_encoder_leaves_the_device(tmp_path, monkeypatch):
    model, before = models.fixture_model(NAME), len(jax.live_arrays())

    class Reader:
        def __init__(self):
            self.weights, self.self = jax.numpy.ones((64, 64)), self

        def encode(self, prompts, *_, **__):
            empty, width = np.ones(len(prompts), bool), model.config.text_channels
            kv = np.ones((len(prompts), width), np.float32)
            return TextFeatures(kv=kv, lens=np.ones(len(prompts), int), unconditional=empty)

    monkeypatch.setattr(TextEncoder, "load", lambda *_: Reader())
    gc.disable()
    try:
        found = conditions.resolve(model, prompts=["a", "b"])
    finally:
        gc.enable()
    assert len(found) == 2 and len(jax.live_arrays()) <= before


@pytest.mark.parametrize(
    "policy", often((Streaming(budget=0.2),), (Full(), Streaming(budget=0.2))), ids=str
)
def test_predicted_bytes_bound_the_compiled_program(monkeypatch, policy):
    """Drawing codes, where attention dominates without kernels."""
    model = models.fixture_model("infinity_a").with_template(2.0, "0.25M")
    plan = plan_cache(model.geometry, policy)
    generator = models.greedy_generator(model, plan=plan, keep_logits=False, segments=1)
    generator.compile(models.arrays_of(model, [0, 1]))
    stats = generator.program.codes.memory_analysis()
    needed = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    # decoding pixels, which is another program, would be the larger part of the prediction
    monkeypatch.setattr(Decoding, "image_bytes", lambda *_: 1)
    sizes = (2, "float32", "float32")
    predicted = memory.predict(model, plan, *sizes, kernels=False, text_tokens=16)
    assert needed / memory.SAFETY > predicted.total * 0.5  # and not far too high
    assert needed <= predicted.total / memory.SAFETY
