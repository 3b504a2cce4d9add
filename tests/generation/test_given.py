"""Tokens that are given at any place of any image."""

import itertools

import numpy as np
import pytest

from tests import models_under_test as models
from tests.often import often
from varjax.core.errors import UserError
from varjax.core.given import Given
from varjax.generation.generator import Generator

INDEX = np.arange(2, dtype=np.int32)


NAMES = ("b_k6_sharedaln", "infinity_a_small", "llamagen_c2i")
OFTEN = [("b_k6_sharedaln", "full")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"), often(OFTEN, itertools.product(NAMES, ("full", "streaming")))
)
def test_any_place_of_any_image(name, policy):
    """Given places hold what is given, the other image is drawn as without, and an array with a
    count is the same as naming its places."""
    model = models.fixture_model(name)
    generator = Generator(model, policy, 1.0 if policy == "full" else 0.6, batch_size=2)
    condition = models.arrays_of(model, INDEX)
    order = generator.plan.geometry.schedule
    nothing = Given.of(model.token_arrays.no_tokens(2), order, 0)
    free = np.asarray(generator.run_batch(condition, INDEX, seed=5, given=nothing)[0]["tokens"])
    other = np.asarray(
        generator.run_batch(condition, INDEX, seed=6, given=nothing)[0]["tokens"]
    )  # tokens that the model may draw
    where = np.zeros(free.shape[:2], bool)
    where[1, 2::3] = True
    given = Given(other, where)
    found = np.asarray(generator.run_batch(condition, INDEX, seed=5, given=given)[0]["tokens"])
    np.testing.assert_array_equal(found[where], other[where])
    np.testing.assert_array_equal(found[0], free[0])
    assert (found[1] != free[1]).any() and (found[1][~where[1]] != other[1][~where[1]]).any()
    # an array with a count of scales, or tokens, is the beginning of every image
    steps = 3
    first = np.broadcast_to(np.arange(free.shape[1]) < order.first_tokens(steps), where.shape)
    counted, _ = generator.run_batch(condition, INDEX, seed=5, given=other, given_scales=steps)
    named, _ = generator.run_batch(condition, INDEX, seed=5, given=Given(other, first))
    np.testing.assert_array_equal(counted["tokens"], named["tokens"])
    np.testing.assert_array_equal(np.asarray(named["tokens"])[first], other[first])
    # so is an array that ends there, as tokens or as lists
    short = other[:, : order.first_tokens(steps)]
    bits = short.dtype == np.uint8  # lists have no type, and programs are compiled for one
    for given in (short,) if bits else (short, short.tolist()):
        ended, _ = generator.run_batch(condition, INDEX, seed=5, given=given, given_scales=steps)
        np.testing.assert_array_equal(ended["tokens"], named["tokens"])
    for steps in (-1, order.num_drawn + 1):
        with pytest.raises(UserError, match="given (scales|tokens)"):
            generator.run_batch(condition, INDEX, seed=5, given=other, given_scales=steps)


@pytest.mark.slow
def test_series_take_the_rows_of_their_images():
    model = models.fixture_model("b_k6_sharedaln")
    generator = Generator(model, "full", batch_size=2)
    condition = models.condition(model, [0, 1, 2])
    tokens = np.arange(3)[:, None] + np.zeros((1, model.config.total_tokens), np.int32)
    order = generator.plan.geometry.schedule
    for given in (tokens, Given.of(tokens, order)):
        for index, results in generator.batches(condition, given=given):
            np.testing.assert_array_equal(results["tokens"], tokens[index])
