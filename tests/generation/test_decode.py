"""Drawing as a function in programs of one's own, and what the compiled program takes."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from tests import models_under_test as models
from tests.often import often
from varjax import conditions
from varjax.core import decode

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "howto" / "generate.md"
NAMES = ("c_k5_nol2norm", "llamagen_c2i")


@functools.cache
def generator(name: str) -> varjax.Generator:
    segments = 1 if name == NAMES[0] else "auto"
    build = varjax.Build(decode_dtype="float32", segments=segments)
    return varjax.Generator(models.fixture_model(name), "h2o", 0.6, batch_size=2, build=build)


@pytest.mark.parametrize("name", often(NAMES[:1], NAMES))
def test_two_runs_at_once(name):
    """Jitted and vmapped over conditions and keys: the tokens of two runs of the generator."""
    drawn = generator(name)
    labels = [conditions.resolve(drawn.model, labels=pair) for pair in ([1, 3], [2, 0])]
    told = [drawn.decode_arguments(pair, seed) for seed, pair in enumerate(labels)]
    params, state, _, _, inputs = told[0]
    condition, keys = (jnp.stack([told[run][i] for run in (0, 1)]) for i in (2, 3))
    runs = jax.jit(jax.vmap(decode, in_axes=(None, None, 0, 0, None)))
    found, _ = runs(params, state, condition, keys, inputs)
    for seed, pair in enumerate(labels):
        expected = drawn.draw(pair, np.arange(2), seed=seed)
        np.testing.assert_array_equal(found["tokens"][seed], expected["tokens"])


@pytest.mark.parametrize("name", often(NAMES[:1], NAMES))
def test_refuses_what_does_not_fit(name):
    drawn = generator(name)
    with pytest.raises(varjax.UserError, match="give what varjax.conditions.resolve"):
        drawn.decode_arguments([1, 3])
    condition = conditions.resolve(drawn.model, labels=[1, 3])
    params, state, condition, keys, inputs = drawn.decode_arguments(condition)
    for wrong in (keys[0], keys[:1]):
        with pytest.raises(varjax.UserError, match="a cache for 2 images: give one for each"):
            jax.eval_shape(decode, params, state, condition, wrong, inputs)


@pytest.mark.slow
def test_the_page(monkeypatch):
    """docs/howto/generate.md says how to watch, keep and decode, and how to call the core."""
    small = models.fixture_model(NAMES[0])
    monkeypatch.setattr(varjax, "load", lambda: small)
    codes = re.compile("```python\n(import jax\\b.*?)```", re.DOTALL)
    watching, calling = codes.findall(PAGE.read_text("utf-8"))
    names, pure = {}, {}
    exec(watching, names)
    results, previews = names["results"], names["previews"]
    np.testing.assert_allclose(names["images"], results["images"], atol=1e-5)
    np.testing.assert_array_equal(previews[-1], names["images"])
    assert results["logits"].shape[:2] == results["tokens"].shape
    assert len(previews) == names["generator"].plan.geometry.schedule.num_scales
    exec(calling, pure)
    np.testing.assert_array_equal(pure["results"]["tokens"], results["tokens"])


def test_called_again_no_module_is_looked_at():
    """The weights are a flat tuple; modules may then be gone. Others would be arranged again."""
    drawn = models.built(models.fixture_model(NAMES[0]), batch_size=1, segments=1, layers="unroll")
    first = drawn([3], seed=1)
    other = models.built(drawn.model, batch_size=1, segments=1, layers="scan")
    np.testing.assert_allclose(other([3], seed=1), first, atol=1e-5)
    np.testing.assert_array_equal(drawn([3], seed=1), first)  # arranged again
    drawn.networks = drawn._weights.networks = None
    np.testing.assert_array_equal(drawn([3], seed=1), first)
    weights = drawn.program.codes.in_avals[0][0]
    assert isinstance(weights, tuple) and len(weights) == len(drawn._weights.arrays())


def test_what_belongs_to_the_build():
    model = models.fixture_model(NAMES[0])
    with pytest.raises(varjax.UserError, match="^watch=7: give a function"):
        varjax.Build(watch=7)
    with pytest.raises(varjax.UserError, match="^build=3: give a varjax.Build"):
        varjax.Generator(model, build=3)
