"""A seed for each image of a batch, and what is told while a batch is drawn."""

import jax
import numpy as np
import pytest

from tests import models_under_test as models
from tests.often import often
from varjax.core.errors import UserError


@pytest.mark.slow
def test_a_seed_for_each_image():
    model = models.fixture_model("c_k5_nol2norm")
    generator = models.built(model, "headkv", 0.6, batch_size=3, segments=1)
    labels, index = np.array([1, 1, 2], np.int32), np.array([0, 0, 3], np.int32)

    def tokens(seed):
        return np.asarray(generator.run_batch(labels, index, seed=seed)[0]["tokens"])

    five, six, mixed = tokens(5), tokens(6), tokens(np.array([5, 6, 5]))
    np.testing.assert_array_equal(mixed, np.stack([five[0], six[1], five[2]]))
    assert (five[0] == five[1]).all() and (five[0] != six[0]).any()
    np.testing.assert_array_equal(tokens([5, 6, 5]), mixed)
    for wrong in ([5, 6], [5, 6, -1], [5, 6, 2**31], [5, 6, 1.5], np.ones((3, 1), int)):
        with pytest.raises(UserError, match="seed"):
            generator.run_batch(labels, index, seed=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", often(["llamagen_c2i"], ["c_k5_nol2norm", "llamagen_c2i"]))
def test_watching(name):
    """Every step is told once, in the end the results; and they do not change."""
    model, seen = models.fixture_model(name), {}

    def watch(number, what):
        assert int(number) not in seen
        seen[int(number)] = np.array(what)

    options = {"batch_size": 2, "segments": "auto"}
    arrays, index = models.arrays_of(model, [0, 1]), np.arange(2, dtype=np.int32)
    watched = models.built(model, "streaming", 0.6, watch=watch, **options)
    results, _ = watched.run_batch(arrays, index, seed=3)
    jax.effects_barrier()
    plain, _ = models.built(model, "streaming", 0.6, **options).run_batch(arrays, index, seed=3)
    np.testing.assert_array_equal(results["tokens"], plain["tokens"])
    steps = watched.plan.geometry.schedule.num_drawn
    assert sorted(seen) == list(range(steps))
    if model.draws_tokens:
        tokens = np.concatenate([seen[i] for i in range(steps)], axis=1)
        np.testing.assert_array_equal(tokens, results["tokens"])
    else:
        np.testing.assert_array_equal(seen[steps - 1], results["code_map"])
