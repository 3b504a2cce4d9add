"""LlamaGen through the engine, by the public API: the original's tokens and logits with the full
cache, and what holds for every policy."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.generation import test_llamagen_parity as parity
from varjax.engine import memory
from varjax.errors import UserError
from varjax.generator import Generator
from varjax.models.labels import Labels
from varjax.parallel.split import MeshSpec
from varjax.policies import POLICIES, get_policy
from varjax.sampling import Sampling
from varjax.sequence import TOKENS

# a table needs a file, and budget 1 is not what it is for
BY_TOKEN = [n for n, c in POLICIES.items() if c.serves(TOKENS) and n not in ("full", "table")]
DRAWN = Sampling(cfg=2.0, tau=0.9, top_k=50, top_p=0.9)


def generator(name: str, policy="full", budget=None, **options) -> Generator:
    options = {"matmul_precision": "highest", "batch_size": 2, "kv_dtype": "float32", **options}
    return Generator(models.fixture_model(name), policy, budget, **options)


def greedy(arrays: dict) -> Sampling:
    cfg, interval = float(arrays["cfg_scale"]), int(arrays["cfg_interval"])
    return Sampling(cfg=cfg, cfg_interval=interval, greedy=True)


@pytest.mark.parametrize(
    ("file", "one_slot"),
    [("gpt_c2i_gen_interval", True), ("gpt_t2i_gen", True), ("gpt_t2i_gen", False)],
)
def test_as_the_original(file, one_slot):
    """Tokens and guided logits; texts with padding, in one slot and in all of their slots."""
    arrays = models.llamagen_fixture(file)
    model, sampling = models.fixture_model(parity.CASES[file]), greedy(arrays)
    plan = varjax.plan(model.geometry_for(sampling, one_slot=one_slot))
    images = len(arrays["tokens"])
    options = {"plan": plan, "sampling": sampling, "keep_logits": True, "batch_size": images}
    found = generator(parity.CASES[file], **options)
    results, caches = found.run_batch(parity.condition_of(arrays), np.arange(images))
    np.testing.assert_array_equal(results["tokens"], arrays["tokens"])
    parity.close(results["logits"], parity.mixed(arrays), parity.LOGITS)
    slots = model.config.image_tokens - 1 + (1 if one_slot else model.config.condition_tokens)
    assert caches[0].pool.shape == (2 * images, 4, slots, 32)
    assert found.allocated_bytes == plan.dense_bytes(images, "float32")


def test_without_guidance():
    """Half the rows; only every fourth column of the original's logits is kept."""
    arrays = models.llamagen_fixture(parity.MORE)
    labels = arrays["c2i_class_ids"]
    options = {"sampling": Sampling(cfg=1.0, greedy=True), "keep_logits": True}
    found = generator("llamagen_c2i", batch_size=len(labels), **options)
    results, caches = found.run_batch(labels, np.arange(len(labels)))
    np.testing.assert_array_equal(results["tokens"], arrays["c2i_tokens"])
    parity.close(results["logits"][:, ::4], arrays["c2i_logits"], parity.LOGITS)
    assert len(caches[0].pool) == len(labels)


# --- drawn, not greedy ----------------------------------------------------------------------------


@functools.cache
def headkv(batch_size: int) -> Generator:
    return generator(
        "llamagen_c2i", "headkv", 0.5, sampling=DRAWN, batch_size=batch_size, keep_logits=True
    )


def drawn(batch_size: int, labels, given=None, count: int | None = 0) -> dict[str, np.ndarray]:
    """The first `count` tokens are given ones."""
    condition = Labels.of(labels, 20)
    given = np.zeros((len(labels), 64), np.int32) if given is None else given
    found = headkv(batch_size).batches(condition, given=given, given_scales=count)
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *(part for _, part in found))


def test_a_batch_equals_its_rows_alone():
    """Whatever the batch, padded in the end; every image has a key of its own."""
    together, alone = drawn(2, [3, 3, 7]), drawn(1, [3, 3, 7])
    np.testing.assert_array_equal(together["tokens"], alone["tokens"])
    parity.close(together["images"], alone["images"], 1e-4)
    assert (together["tokens"][0] != together["tokens"][1]).any()


def test_given_tokens():
    """All of a run's own tokens give its logits; a few other ones are followed by a free draw."""
    free = drawn(1, [3])
    again = drawn(1, [3], free["tokens"], None)
    np.testing.assert_array_equal(again["tokens"], free["tokens"])
    parity.close(again["logits"], free["logits"], 1e-4)
    other = (free["tokens"] + 1) % 256
    forced = drawn(1, [3], other, 10)
    np.testing.assert_array_equal(forced["tokens"][:, :10], other[:, :10])
    assert (forced["tokens"][:, 10:] != other[:, 10:]).mean() > 0.9
    assert np.abs(forced["logits"][:, 0] - free["logits"][:, 0]).max() < 1e-4
    assert np.abs(forced["logits"][:, 1] - free["logits"][:, 1]).max() > 0.1


def test_generate():
    """The one call: prefix of a model's policy and budget, pictures in [0, 1]."""
    model = models.fixture_model("llamagen_c2i")
    images = varjax.generate(model, labels=[3, 3], policy="streaming", budget=0.5, sampling=DRAWN)
    assert images.shape == (2, 32, 32, 3) and 0 <= images.min() < images.max() <= 1


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", BY_TOKEN)
def test_a_budget_of_1_is_the_full_cache(policy):
    """One program: plans are equal."""
    for name in ("llamagen_c2i", "llamagen_t2i"):
        model = models.fixture_model(name)
        assert varjax.plan(model, policy, 1.0) == varjax.plan(model)


@pytest.mark.parametrize("policy", BY_TOKEN)
def test_predicted_and_planned_bytes(policy):
    """The pool is exact; everything that is carried is within a tenth of it."""
    model = models.fixture_model("llamagen_c2i")
    plan = varjax.plan(model, get_policy(policy, 0.5))
    found = memory.predict(model, plan, 2, "float32", "float32")
    pool = plan.num_bytes(2, "float32")
    assert pool <= 0.5 * plan.dense_bytes(2, "float32")
    assert pool <= found.kv_pool <= 1.3 * pool


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 2}, "segments=2: models that draw token by token have no scales to cut"),
        ({"layers": "scan"}, "layers='scan': models that draw token by token run a body per layer"),
        ({"unroll": True}, "unroll=True: models that draw token by token have no scans"),
        (
            {"policy": "headkv", "budget": 0.5, "mesh": MeshSpec(model=2)},
            r"mesh data=1,model=2: policy 'headkv' decides .* beforehand \(full, swa, streaming\)",
        ),
        ({"mesh": MeshSpec(data=64), "batch_size": 64}, "takes 64 devices, this machine has"),
        ({"policy": "heatkv"}, "heatkv"),
        ({"policy": "headkv", "budget": 0.02}, "smallest feasible budget is 0"),
        ({"sampling": Sampling(top_k=257)}, "top_k=257"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(UserError, match=message):
        generator("llamagen_c2i", **options)


def test_plan_of_another_model():
    model = models.fixture_model("llamagen_c2i")
    other = dataclasses.replace(model.geometry, num_heads=2)
    with pytest.raises(UserError, match="its num_heads is 2, this model has 4"):
        Generator(model, plan=varjax.plan(other))
