"""Layers stacked and separate: the same numbers, nothing lost on the way there and back."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models_under_test import arrays_of, fixture_model, greedy_generator
from varjax.core import stacked
from varjax.core.errors import UserError
from varjax.core.layers import Linear
from varjax.fast import arrange
from varjax.generation import build
from varjax.storage import parameters

DEPTH, WIDTH = 3, 4


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.early = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))


def layers() -> nnx.Module:
    return stacked.stack(lambda rngs: Layer(rngs), DEPTH, nnx.Rngs(0))


def body(x, inputs):
    block, offset = inputs
    return x + block.second(jnp.tanh(block.first(x))) * block.scale[...] + offset


def test_there_and_back():
    blocks, expected = layers(), parameters.named(layers())
    arrange.separate(blocks, ("early",))
    assert stacked.is_separate(blocks)
    linear = {name: getattr(blocks, name).kernel for name in ("first", "second", "early")}
    apart = {name for name, kernel in linear.items() if stacked.is_one(kernel.get_value())}
    assert apart == {"first", "second"}
    one = blocks.first.kernel.get_value()
    assert (one.shape, one.dtype) == ((DEPTH, WIDTH, WIDTH), jnp.float32)
    chex.assert_trees_all_equal(parameters.named(blocks), expected)  # as if they were stacked
    arrange.separate(blocks, ("early",))  # again: nothing happens
    arrange.restack(blocks)
    assert not stacked.is_separate(blocks)
    chex.assert_trees_all_equal(parameters.named(blocks), expected)


def test_scans_are_equal():
    blocks, x = layers(), jnp.ones((2, WIDTH))
    inputs = (blocks, jnp.arange(DEPTH))
    expected = stacked.scan(body, x, inputs)
    arrange.separate(blocks)
    found = jax.jit(lambda blocks: stacked.scan(body, x, (blocks, jnp.arange(DEPTH))))(blocks)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)
    one_after_another = x
    for i in range(DEPTH):
        one_after_another = body(one_after_another, stacked.layer((blocks, jnp.arange(DEPTH)), i))
    chex.assert_trees_all_close(found, one_after_another, rtol=1e-6)


def test_numbered_layers_share_a_body():
    """The last one's, too."""

    def numbered(x, block, number):
        return body(x, (block, number))

    blocks, x = layers(), jnp.ones((2, WIDTH))
    expected = stacked.scan(body, x, (blocks, jnp.arange(DEPTH)))
    run = jax.jit(lambda blocks: stacked.scan_numbered(numbered, x, blocks))
    chex.assert_trees_all_close(run(blocks), expected, rtol=1e-6)
    arrange.separate(blocks)
    chex.assert_trees_all_close(run(blocks), expected, rtol=1e-6)
    assert run.lower(blocks).as_text().count("func.func private @numbered") == 1


class Turnable(nnx.Module):
    def __init__(self, rngs):
        self.wide = Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.back = Linear(3 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.back(jnp.tanh(self.wide(x)))


def turnable() -> nnx.Module:
    blocks = stacked.stack(lambda rngs: Turnable(rngs), DEPTH, nnx.Rngs(0))
    blocks.wide.bias.set_value(jnp.arange(3.0 * DEPTH * WIDTH).reshape(DEPTH, -1) / 10)
    return blocks


@pytest.mark.parametrize("shape", [(2, WIDTH), (2, 1, WIDTH), (2, 3, WIDTH)], ids=str)
def test_turned_matrices_multiply_alike(shape):
    x = jax.random.normal(jax.random.key(1), shape)
    expected = stacked.scan(lambda x, block: block(x), x, turnable())
    blocks = turnable()
    arrange.separate(blocks, turned=True)
    assert blocks.wide.kernel.get_value()[1].array.shape == (3 * WIDTH, WIDTH)
    found = stacked.scan(lambda x, block: block(x), x, blocks)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("b_k6_sharedaln", marks=pytest.mark.slow),
        "c_k5_nol2norm",
        pytest.param("infinity_a_small", marks=pytest.mark.slow),
    ],
)
def test_unrolled_layers_draw_the_same_tokens(name):
    model = fixture_model(name)
    numbers = np.arange(2, dtype=np.int32)
    generators = {how: greedy_generator(model, layers=how) for how in ("scan", "unroll")}
    assert stacked.is_separate(model.transformer)
    found = {}
    for how in ("scan", "unroll", "scan"):  # each takes the weights as it needs them
        found[how], _ = generators[how].run_batch(arrays_of(model, [1, 2]), numbers)
        assert stacked.is_separate(model.transformer) == (how == "unroll")
    np.testing.assert_array_equal(found["unroll"]["tokens"], found["scan"]["tokens"])
    np.testing.assert_allclose(found["unroll"]["logits"], found["scan"]["logits"], atol=1e-4)


def test_large_models_are_unrolled_but_on_tpus(monkeypatch):
    model = fixture_model("c_k5_nol2norm")
    monkeypatch.setattr(build, "SCANNED_BYTES", 0)
    for platform, apart in {"tpu": False, "gpu": True, "cpu": True}.items():
        build.arrange_layers(model.networks, "auto", platform)
        assert stacked.is_separate(model.transformer) == apart
    build.arrange_layers(model.networks, "scan", "gpu")
    assert not stacked.is_separate(model.transformer)


def test_other_names_are_refused():
    with pytest.raises(UserError, match="layers.*auto, scan, unroll"):
        greedy_generator(fixture_model("c_k5_nol2norm"), layers="both")
