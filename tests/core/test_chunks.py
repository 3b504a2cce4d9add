"""Chunks give what one call gives, whatever the number of images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models_under_test import fixture_model, greedy_generator
from varjax.core import scales
from varjax.core.segments import map_in_chunks


@pytest.mark.parametrize("at_once", [0, 2, 7, 100])
def test_map_in_chunks(at_once):
    x = jnp.arange(14.0).reshape(7, 2)
    most = []

    def function(index):
        most.append(x[index].shape[0])
        return {"double": 2 * x[index], "sum": x[index].sum(-1)}

    found = jax.jit(lambda: map_in_chunks(function, 7, at_once))()
    np.testing.assert_array_equal(found["double"], 2 * x)
    np.testing.assert_array_equal(found["sum"], x.sum(-1))
    assert max(most) <= max(1, at_once)


def test_tokens_sampled_in_chunks_are_the_same(monkeypatch):
    """Three images, two at a time: every image has its own noise and its own logits."""
    labels, index = np.array([3, 1, 4]), np.arange(3, dtype=np.int32)

    def run():
        generator = greedy_generator(fixture_model("c_k5_nol2norm"), batch_size=3)
        return generator.run_batch(labels, index)[0]

    expected = run()
    monkeypatch.setattr(scales, "images_at_once", lambda tokens, vocab: 2)
    found = run()
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-5)
