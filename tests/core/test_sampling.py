"""Filters against the original's kept sets; distribution and independence of the draws."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models_under_test import fixture, llamagen_fixture
from varjax.core.errors import UserError
from varjax.core.sampling import Sampling, Scores, guided, gumbel, image_keys, sample
from varjax.core.sampling import filter_logits as _filter_logits
from varjax.storage.manifest import recommended_sampling

filter_logits = jax.jit(_filter_logits, static_argnums=(1, 2))


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
        chex.assert_trees_all_equal(np.isfinite(found), kept, custom_message=f"case {i}")


def test_filters_give_the_probabilities_of_llamagen():
    """Temperature, top-k with equal logits kept, top-p with the first one beyond it kept; 0 and 1
    switch filters off."""
    arrays = llamagen_fixture("sampler_vectors")
    logits = jnp.asarray(arrays["logits"])
    cases = [name for name in arrays if name.startswith("probs_")]
    assert len(cases) == 4
    for case in cases:
        top_k, top_p, tau = (float(part[1:]) for part in case.split("_")[1:])
        for off in (top_p, 0.0) if top_p == 1 else (top_p,):
            scores = Scores(logits[:, None], jnp.float32(tau)).guided()
            found = jax.nn.softmax(filter_logits(scores, int(top_k), off))[:, 0]
            chex.assert_trees_all_close(found, arrays[case], rtol=0, atol=1e-5)
            chex.assert_trees_all_equal(found > 0, arrays[case] > 0, custom_message=case)


def test_guidance():
    logits = jnp.array([[[1.0, 2.0]], [[0.5, 3.0]]])
    chex.assert_trees_all_close(
        guided(logits, strength=jnp.float32(1.5)), np.array([[[1.75, 0.5]]])
    )


def test_noise_does_not_depend_on_padding():
    keys = image_keys(3, jnp.arange(2))
    chex.assert_trees_all_equal(gumbel(keys, 4, 10), gumbel(keys, 9, 10)[:, :4])


def test_draws_follow_the_distribution():
    logits = jnp.log(jnp.array([0.1, 0.2, 0.7]))
    scores = Scores(jnp.broadcast_to(logits, (4000, 1, 3)))
    tokens, _ = jax.jit(lambda k: sample(scores, k, Sampling()))(image_keys(0, jnp.arange(4000)))
    counts = np.bincount(np.asarray(tokens)[:, 0], minlength=3) / 4000
    chex.assert_trees_all_close(
        counts, np.array([0.1, 0.2, 0.7]), atol=0.03
    )  # four standard deviations


def test_equal_logits_share_their_fate():
    logits = jnp.array([[1.0, 1.0, 0.0, -0.0, -2.0]])
    assert np.isfinite(filter_logits(logits, 3, 0)).tolist() == [[True, True, True, True, False]]
    chex.assert_tree_all_finite(filter_logits(jnp.zeros((1, 4)), 0, 0.5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 11}, "top_k=11"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": float("nan")}, "top_p"),
        ({"cfg": -1.0}, "cfg"),
        ({"cfg": float("nan")}, "cfg"),
        ({"cfg": "high"}, "cfg='high': it must be a number"),
        ({"cfg": 10**400}, "cfg=1000"),
        ({"top_k": 1.5}, "top_k=1.5: it must be a whole number"),
        ({"greedy": 1}, "greedy=1: it must be true or false"),
        ({"more_smooth": "yes"}, "more_smooth='yes'"),
        ({"cfg": (1.0, 2.0)}, "cfg lists 2 numbers, the schedule has 3 scales"),
        ({"cfg": (1.0, 2.0, "x")}, "cfg='x': it must be a number"),
        ({"cfg": [1.0, 2.0, -3.0]}, "cfg=-3"),
        ({"tau": 0.0}, "tau=0: the temperature"),
        ({"tau": (1.0, 1.0, float("nan"))}, "tau=nan"),
        ({"cfg_insertion_layer": ()}, "cfg_insertion_layer"),
        ({"cfg_insertion_layer": (0.5,)}, "cfg_insertion_layer=0.5: it must be a whole number"),
        ({"top_k": (3,)}, "top_k="),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(UserError, match=message):
        Sampling(**values).check(3, 10)


def test_numbers_of_numpy_are_numbers():
    values = {"cfg": np.float32(2), "top_k": np.int64(3), "greedy": np.bool_(True)}
    assert recommended_sampling(values, more_smooth=np.bool_(False)).check(3, 10).top_k == 3


def test_one_number_or_one_per_scale():
    one, many = Sampling(cfg=2.0, tau=0.5), Sampling(cfg=[1, 2.5, 4])
    assert one.check(3, 10).per_scale("cfg", 3) == (2.0, 2.0, 2.0)
    assert many.check(3).per_scale("cfg", 3) == (1, 2.5, 4) and hash(many) is not None
    assert float(many.at("cfg", jnp.int32(1), 3)) == 2.5
    assert one.guidance == Sampling(cfg=[2, 2, 2]).guidance == 2.0
    assert many.guidance == "1,2.5,4"
    assert Sampling(cfg=2.0, cfg_insertion_layer=[0, -2]).guidance == "2 at 0,-2"
    with pytest.raises(UserError, match="cfg lists 3 numbers, the schedule has 4"):
        many.check(4)


@pytest.mark.parametrize("settings", [None, [1], "cfg", 3])
def test_recommendations_are_names_and_values(settings):
    with pytest.raises(UserError, match="it must hold names and values"):
        recommended_sampling(settings)
