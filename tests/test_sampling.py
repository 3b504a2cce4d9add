"""Filters against the original's kept sets; distribution and independence of the draws."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models_under_test import fixture
from varjax.errors import UserError
from varjax.sampling import Sampling, filter_logits, guide, gumbel, image_keys, sample


def test_filters_keep_what_the_original_keeps():
    arrays = fixture("ops", "filter")
    cases = sorted(int(k.split("_")[1]) for k in arrays if k.startswith("logits_"))
    assert len(cases) >= 5 and json.loads(str(arrays["meta_json"]))
    for i in cases:
        logits = arrays[f"logits_{i}"]
        kept = np.unpackbits(
            arrays[f"keep_{i}"], axis=-1, bitorder="little", count=logits.shape[-1]
        ).astype(bool)
        found = filter_logits(
            jnp.asarray(logits), int(arrays[f"top_k_{i}"]), float(arrays[f"top_p_{i}"])
        )
        np.testing.assert_array_equal(np.isfinite(found), kept, err_msg=f"case {i}")


def test_guidance():
    logits = jnp.array([[[1.0, 2.0]], [[0.5, 3.0]]])
    np.testing.assert_allclose(guide(logits, jnp.float32(1.5)), [[[1.75, 0.5]]])


def test_noise_does_not_depend_on_padding():
    keys = image_keys(3, jnp.arange(2))
    np.testing.assert_array_equal(gumbel(keys, 4, 10), gumbel(keys, 9, 10)[:, :4])


def test_draws_follow_the_distribution():
    logits = jnp.log(jnp.array([0.1, 0.2, 0.7]))
    keys = image_keys(0, jnp.arange(4000))
    tokens, _ = jax.jit(lambda k: sample(jnp.broadcast_to(logits, (4000, 1, 3)), k, Sampling()))(
        keys
    )
    counts = np.bincount(np.asarray(tokens)[:, 0], minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.7], atol=0.03)  # four standard deviations


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 11}, "top_k=11"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"cfg": -1.0}, "cfg"),
        ({"cfg": float("nan")}, "cfg"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(UserError, match=message):
        Sampling(**values).check(10)
