"""The encoder: buckets by the definition, configurations, padding, types of numbers."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.text_encoder_under_test import CONFIG
from varjax.errors import UserError
from varjax.nn import parameters
from varjax.text import t5
from varjax.text.t5 import T5Config, T5Encoder

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


def _bucket(offset: int, buckets: int, most: int) -> int:
    """The published definition, for one offset = key - query."""
    half, distance = buckets // 2, abs(offset)
    exact = half // 2
    if distance < exact:
        within = distance
    else:
        far = math.log(distance / exact) / math.log(most / exact) * (half - exact)
        within = min(exact + math.floor(far + 1e-9), half - 1)
    return within + half * (offset > 0)


@pytest.mark.parametrize("buckets,most", [(32, 128), (8, 20)])
def test_buckets(buckets, most):
    config = T5Config.from_published(
        {
            **GIVEN,
            "relative_attention_num_buckets": buckets,
            "relative_attention_max_distance": most,
        }
    )
    found = t5.relative_buckets(config, 300)
    wanted = [[_bucket(k - q, buckets, most) for k in range(300)] for q in range(0, 300, 37)]
    chex.assert_trees_all_equal(found[::37], np.array(wanted))
    assert set(np.unique(found)) == set(range(buckets)) - {buckets // 2}  # distance 0 is not ahead


def test_configuration_is_read_and_written_by_published_names():
    config = T5Config.from_published(GIVEN)
    assert (config.num_layers, config.d_kv, config.layer_norm_epsilon) == (2, 16, 1e-6)
    assert T5Config.from_published(config.to_published()) == config


REFUSED = {
    "version 1.0": ({"feed_forward_proj": "relu"}, "'relu'.*supported is 'gated-gelu'"),
    "no feed-forward": ({"feed_forward_proj": None}, "feed_forward_proj is None"),
    "text": ({"num_layers": "2"}, "num_layers is '2', it must be a whole number"),
    "too deep": ({"num_layers": 10**6}, "num_layers is 1000000, it must be at most"),
    "no heads": ({"num_heads": 0}, "num_heads is 0, it must be at least 1"),
    "buckets": ({"relative_attention_num_buckets": 30}, "must be a multiple of 4"),
    "distance": ({"relative_attention_max_distance": 8}, "more than a quarter"),
    "epsilon": ({"layer_norm_epsilon": -1.0}, "layer_norm_epsilon"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_are_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        T5Config.from_published({**GIVEN, **changes})


def test_all_missing_entries_are_named():
    with pytest.raises(UserError, match="vocab_size, d_kv not given"):
        T5Config.from_published({k: v for k, v in GIVEN.items() if k not in ("vocab_size", "d_kv")})


@pytest.mark.parametrize(
    "name,count", [("flan-t5-small", 35_332_800), ("flan-t5-xl", 1_223_527_424)]
)
def test_published_sizes(name, count):
    """Encoder parameters by hand: table, position bias, layers of four attention and three
    feed-forward products with two norms, final norm."""
    config = t5.PRESETS[name]
    module = parameters.abstract(T5Encoder, config)
    inner = config.num_heads * config.d_kv
    layer = config.d_model * (4 * inner + 3 * config.d_ff + 2)
    table = config.vocab_size * config.d_model + 32 * config.num_heads
    assert table + config.num_layers * layer + config.d_model == count
    assert parameters.count(module) == count


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


def test_layers_are_scanned():
    """One compiled body for all layers: the program does not grow with their number."""

    def size(num_layers):
        config = dataclasses.replace(CONFIG, num_layers=num_layers)
        module = parameters.abstract(T5Encoder, config)
        ids, lengths = jnp.zeros((1, 16), jnp.int32), jnp.ones(1, jnp.int32)
        return str(jax.make_jaxpr(lambda m: m(ids, lengths))(module)).count("dot_general")

    assert size(2) == size(9)
