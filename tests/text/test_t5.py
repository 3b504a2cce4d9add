"""The encoder: buckets by the definition, configurations, padding, types of numbers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from varjax.core.errors import UserError
from varjax.text.t5 import T5Config

GIVEN = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 128,
    "d_kv": 16,
    "d_model": 64,
    "feed_forward_proj": "gated-gelu",
    "model_type": "t5",
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 128,
    "n_positions": 512,
}


REFUSED = {
    "version 1.0": ({"feed_forward_proj": "relu"}, "'relu'.*supported is 'gated-gelu'"),
    "buckets": ({"relative_attention_num_buckets": 30}, "must be a multiple of 4"),
    "distance": ({"relative_attention_max_distance": 8}, "more than a quarter"),
    "epsilon": ({"layer_norm_epsilon": -1.0}, "layer_norm_epsilon"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_are_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        T5Config.from_published({**GIVEN, **changes})


def test_padding_changes_nothing_and_texts_do_not_see_each_other(random_encoder):
    """Rounding aside: sums have other lengths."""
    ids = np.random.default_rng(0).integers(3, 128, (3, 7)).astype(np.int32)
    run = jax.jit(lambda module, ids, lengths: module(ids, lengths))
    alone = run(random_encoder, ids[1:2], np.array([7]))
    padded = np.pad(ids, ((0, 0), (0, 12)), constant_values=9)
    together = run(random_encoder, padded, np.array([19, 7, 1]))
    chex.assert_trees_all_close(together[1, :7], alone[0], atol=2e-5, rtol=0)
    chex.assert_tree_all_finite(together)


def test_bfloat16_weights_keep_the_features_float32(random_encoder):
    """The residual stream is not rounded: an error of a few units of bfloat16, not of its depth."""
    ids = np.random.default_rng(1).integers(3, 128, (2, 16)).astype(np.int32)
    lengths = np.array([16, 11])
    short = jax.tree.map(lambda a: a.astype(jnp.bfloat16), random_encoder)
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), short)
    run = jax.jit(lambda module, ids, lengths: module(ids, lengths))
    found, wanted = run(short, ids, lengths), run(exact, ids, lengths)
    chex.assert_type(found, jnp.float32)
    difference = np.abs(found - wanted)
    assert 0 < difference.max() < 0.1 and difference.mean() < 0.01
