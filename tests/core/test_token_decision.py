"""Decisions of a stage: layers that decide together, as on GPUs, keep what each keeps alone."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.often import often
from varjax.core import token_decision
from varjax.core.sequence import TOKENS
from varjax.core.token_state import EVERYTHING
from varjax.core.token_step import StageStep
from varjax.core.tokens import token_step
from varjax.policies import POLICIES, get_policy

STAGE, ROWS = 1, 4


def deciding(policy: str):
    """The step of a policy whose layers decide, with the plan; None where contents are known."""
    plan = varjax.plan(models.fixture_model("llamagen_c2i"), get_policy(policy, 0.5))
    step = token_step(plan, 0, None)
    return (step, plan) if isinstance(step, StageStep) else None


# tables need a file
ELSEWHERE = ("full", "table", "learned")
POLICY = [n for n, c in POLICIES.items() if c.serves(TOKENS) and n not in ELSEWHERE]


def filled(cache, step: StageStep, rng):
    """A cache of random numbers, with the positions that tokens may have after stage `STAGE`: some
    slots are empty, those of the buffer follow each other."""
    rows, heads, slots = cache.position.shape
    before = rng.permuted(np.tile(np.arange(STAGE * step.period), (rows, heads, 1)), axis=-1)
    position = np.full((rows, heads, slots), -1, np.int32)
    position[..., : step.condition] = np.arange(step.condition)
    some = min(step.main, before.shape[-1])
    position[..., step.condition : step.condition + some] = step.condition + before[..., :some]
    position[..., step.buffer :] = step.coming(STAGE)

    def random(array):
        if array.dtype == np.int32:  # of reach
            return jnp.asarray(rng.choice([4, EVERYTHING], array.shape), jnp.int32)
        return jnp.asarray(rng.random(array.shape), array.dtype)

    found = jax.tree.map(random, replace(cache, position=None))
    return replace(found, position=jnp.asarray(position))


@pytest.mark.parametrize("policy", often(("headkv",), POLICY))
def test_together_as_on_a_gpu(policy, monkeypatch):
    if (found := deciding(policy)) is None:
        pytest.skip("what is kept is known beforehand")
    step, plan = found
    rng, images = np.random.default_rng(0), ROWS // plan.geometry.rows_per_image
    layers = plan.empty_state(images, "float32", "float32")
    assert all(token_step(plan, i, None) == step for i in range(len(layers)))
    layers = tuple(filled(cache, step, rng) for cache in layers)
    decide = partial(step.decide, stage=jnp.int32(STAGE), bias=None, inputs=None)
    alone = [jax.jit(lambda cache: decide([cache]))(cache)[0] for cache in layers]
    monkeypatch.setattr(token_decision, "target", gpu(9))
    assert step.at_once(layers[0]) >= len(layers) or step.needs.keys
    assert step._short(step.positions) == jnp.int16
    together = jax.jit(lambda layers: decide(layers))(layers)
    moved = 0
    for ours, right, before in zip(together, alone, layers, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, right)
        assert ours.position.dtype == jnp.int32
        moved += (ours.position[..., : step.buffer] != before.position[..., : step.buffer]).sum()
    assert moved > 0


def gpu(major: int) -> SimpleNamespace:
    return SimpleNamespace(platform=lambda: "gpu", major=lambda: major)


def test_how_many_layers_decide_together(monkeypatch):
    """LlamaGen-XL at batch 128 and 1/6 of the cache has 36 layers."""
    step, _ = deciding("headkv")
    layer = SimpleNamespace(position=jax.ShapeDtypeStruct((256, 20, 96), jnp.int32))
    monkeypatch.setattr(token_decision, "target", gpu(8))
    assert step.at_once(layer) == 8
    monkeypatch.setattr(token_decision, "target", gpu(9))
    assert step.at_once(layer) == 21  # two parts of 18
    assert replace(step, attention="mosaic").at_once(layer) == 42


def test_long_buffers(monkeypatch):
    """On GPUs, where a sum is taken in place of a comparison for each token."""
    step, plan = deciding("headkv")
    images = ROWS // plan.geometry.rows_per_image
    layer = plan.empty_state(images, "float32", "float32")[0]
    cache = filled(layer, step, np.random.default_rng(1))

    def run():
        return jax.jit(lambda cache: step.decide([cache], jnp.int32(STAGE), None, None))(cache)

    monkeypatch.setattr(token_decision, "target", gpu(9))
    expected = run()
    monkeypatch.setattr(token_decision, "MOST_CHOSEN", step.period - 1)
    jax.tree.map(np.testing.assert_array_equal, run(), expected)
