"""LlamaGen's transformer: positions, the condition, guidance, types, configuration."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import models_under_test as models
from varjax.core.errors import UserError
from varjax.core.sampling import Sampling
from varjax.models import registry
from varjax.models.llamagen import LlamaGen, LlamaGenConfig, rotation_table
from varjax.storage import parameters

SMALL = {"dim": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "block_size": 36}


def config(**changes) -> LlamaGenConfig:
    return LlamaGenConfig.from_published(SMALL | changes)


def transformer(name: str) -> LlamaGen:
    return models.fixture_model(name).transformer


def text(lengths, rows: int = 8, seed: int = 0) -> dict:
    """Padded features as `TextFeatures.take` gives them, which hold anything behind a text."""
    kv = np.random.default_rng(seed).normal(size=(len(lengths), rows, 32)).astype(np.float32)
    given = {"kv": jnp.asarray(kv), "length": jnp.asarray(lengths, jnp.int32)}
    return given | {"unconditional": jnp.zeros(len(lengths), bool)}


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("freqs_grid8_hd16_cls1", {"block_size": 64}),
        ("freqs_grid6_hd16_cls120", {"model_type": "t2i", "cls_token_num": 120}),
    ],
)
def test_rotation_tables_of_the_original(name, changes):
    expected = models.llamagen_fixture("rope2d")[name]
    cos, sin = rotation_table(config(**changes))
    for ours, part in ((cos, 0), (sin, 1)):
        for number in range(2):  # both numbers of a pair turn by the same angle
            found = ours[:, number::2]
            np.testing.assert_allclose(found, expected[..., part], rtol=0, atol=1e-6)


# --- the condition --------------------------------------------------------------------------------


def test_texts_are_moved_to_the_end():
    """As the original's `cond_in`; what is behind a text in its row has no effect."""
    arrays, model = models.llamagen_fixture("gpt_t2i_gen"), transformer("llamagen_t2i")
    length = jnp.asarray(arrays["t5_mask"].sum(1))
    noise = np.where(arrays["t5_mask"][..., None] == 0, np.float32(9), arrays["t5_features"])
    moved, visible = model._left_padded(jnp.asarray(noise), length)
    np.testing.assert_array_equal(moved, arrays["cond_in"])
    np.testing.assert_array_equal(visible, arrays["emb_mask"])
    assert length.tolist() == [17, 120]


def test_rows_without_the_text():
    """Unconditional rows: the learned text, or a negative one; an empty prompt is one too."""
    model, given = transformer("llamagen_t2i"), text([3, 8])
    context = model.encode_condition(given, guided=True)
    learned = model.encode_text(model.unconditional_text[...][None])
    chex.assert_trees_all_equal(context["condition"][2:3], learned)
    assert context["visible"].sum(1).tolist() == [3, 8, 3, 8]
    other = text([5, 2], seed=1)
    negative = {"negative_kv": other["kv"], "negative_length": other["length"]}
    found = model.encode_condition(given | negative, guided=True)
    alone = model.encode_condition(other, guided=False)
    chex.assert_trees_all_equal(found["condition"][:2], context["condition"][:2])
    chex.assert_trees_all_close(found["condition"][2:], alone["condition"], atol=1e-6)
    assert found["visible"].sum(1).tolist() == [3, 8, 5, 2]
    empty = given | {"unconditional": jnp.array([False, True])}
    found = model.encode_condition(empty, guided=False)
    chex.assert_trees_all_close(found["condition"][1:], learned, atol=1e-6)


# --- guidance, types, layers ----------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "last"), [(-1, 99), (0, 1), (10, 11)])
def test_guidance_ends_with_the_interval(interval, last):
    """The original guides the condition's token and n + 1 further ones."""
    model, x = transformer("llamagen_c2i"), jax.random.normal(jax.random.key(0), (4, 1, 64))
    sampling = Sampling(cfg=3.0, cfg_interval=interval, tau=0.5)
    plain = model.plain_logits(x)
    for index in (0, last, last + 1):
        scores = model.logits(x, jnp.int32(index), sampling)
        guided = plain[2:] + 3 * (plain[:2] - plain[2:])
        expected = guided if index <= last or interval < 0 else plain[:2]
        chex.assert_trees_all_close(replace(scores, tau=None).guided(), expected, atol=1e-4)
        chex.assert_trees_all_close(scores.guided(), expected * 2, atol=2e-4)


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_kv_head": 2}, "n_kv_head=2 is not supported: released models have as many key heads"),
        ({"model_type": "t2v"}, "model_type is 't2v', it must be c2i or t2i"),
        ({"dim": 66}, "dim 66 is not a multiple of n_head 4"),
        ({"dim": 24}, "head size .* 6 is not a multiple of 4"),
        ({"block_size": 35}, "block_size 35 is no square"),
        ({"cls_token_num": 2}, "cls_token_num is 2, it must be at most 1"),
        ({"model_type": "t2i", "caption_dim": 0}, "caption_dim is 0, it must be at least 1"),
        ({"ffn_dim_multiplier": 1e5}, "the feed-forward's width is .*at most"),
        ({"class_dropout_prob": 1.0}, "class_dropout_prob 1.0 is outside"),
    ],
)
def test_wrong_published_values(values, message):
    with pytest.raises(UserError, match=message):
        registry.family("llamagen").parts["transformer"].read(SMALL | values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": 257}, "top_k=257: choose 0 to 256"),
        ({"cfg_insertion_layer": (-1,)}, "LlamaGen mixes its rows on the logits only"),
        ({"more_smooth": True}, "more_smooth mixes codes of scales"),
        ({"cfg_interval": -2}, "cfg_interval=-2: choose -1 to"),
    ],
)
def test_wrong_sampling(values, message):
    with pytest.raises(UserError, match=message):
        config().check_sampling(Sampling(**values))


def test_guidance_needs_a_class_for_none():
    only = config(class_dropout_prob=0)
    with pytest.raises(UserError, match="trained without a class for none"):
        only.check_sampling(Sampling(cfg=1.5))
    assert not only.is_guided(only.check_sampling(Sampling(cfg=1.0)))
    assert registry.llamagen_sampling(only)["cfg"] == 1.0
    table = parameters.named(parameters.abstract(LlamaGen, only))["class_embedding"]
    assert table.shape == (1000, 64)
