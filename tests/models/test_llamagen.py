"""LlamaGen's transformer: positions, the condition, guidance, types, configuration."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import models_under_test as models
from tests.generation.token_by_token import attend
from varjax import conditions
from varjax.errors import UserError
from varjax.models import registry
from varjax.models.llamagen.config import LlamaGenConfig
from varjax.models.llamagen.transformer import LlamaGen, rotation_table
from varjax.nn import parameters, stacked
from varjax.sampling import Sampling
from varjax.text.features import TextFeatures

SMALL = {"dim": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "block_size": 36}
TEXT = SMALL | {"model_type": "t2i", "caption_dim": 32, "cls_token_num": 120}


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


def test_positions_of_heads_of_100():
    """25 frequencies for rows, 25 for columns; token 7 of a 6 x 6 map is in row 1, column 1."""
    cos, _ = rotation_table(config(dim=200, n_head=2))
    assert cos.shape == (37, 100) and (cos[0] == 0).all() and (cos[1] == 1).all()
    angles = np.cos(10000.0 ** (-np.arange(25) / 25))
    np.testing.assert_allclose(cos[1 + 7, ::2], np.tile(angles, 2), atol=1e-6)


def test_tokens_are_counted_from_the_end_of_the_condition():
    model, table = transformer("llamagen_t2i"), rotation_table(transformer("llamagen_t2i").config)
    cos, sin = model.rotation({}, jnp.array([-120, -1, 0, 35]))
    for found, rows in ((cos, table[0]), (sin, table[1])):
        np.testing.assert_array_equal(found, rows[[0, 119, 120, 155]])


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


def test_the_mask_of_a_padded_condition():
    visible = jnp.array([[False, False, True, True]])
    mask = np.asarray(LlamaGen.condition_mask(visible, 2)[0, 0]).astype(int)
    expected = [
        *([1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]),
        *([0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]),
    ]
    assert mask.tolist() == expected


def test_one_slot_is_exact():
    """Attention of image tokens over the condition of a layer and 5 tokens, through both."""
    model = transformer("llamagen_t2i")
    context = model.encode_condition(text([1, 3, 8]), guided=True)
    block, visible = stacked.layer(model.blocks, 1), context["visible"]
    rotation = model.rotation(context, jnp.arange(-120, 0))
    p = model.project(block, rotation, context["condition"])
    assert not np.any(p.keys()) and not np.any(p.queries())
    q, k, v = jax.random.normal(jax.random.key(0), (3, 6, 4, 5, 16))
    q = q / 2
    every = jnp.where(visible, 0.0, -jnp.inf)
    bias = jnp.concatenate([every, jnp.zeros((6, 5))], axis=1)[:, None, None]
    joined = (jnp.concatenate(pair, axis=2) for pair in ((p.keys(), k), (p.values(), v)))
    expected = attend(q, *joined, bias)
    key, value, score = model.condition_slot(p.values(), visible)
    assert model.condition_is_one_slot and value.shape == (6, 4, 1, 16)
    np.testing.assert_allclose(score, np.log([1, 3, 8] * 2), rtol=1e-6)
    bias = jnp.concatenate([score[:, None], jnp.zeros((6, 5))], axis=1)[:, None, None]
    joined = (jnp.concatenate(pair, axis=2) for pair in ((key, k), (value, v)))
    chex.assert_trees_all_close(attend(q, *joined, bias), expected, rtol=0, atol=1e-6)


def test_what_images_are_made_of():
    """Labels or features as the user gives them, checked before anything runs."""
    labels, texts = map(models.fixture_model, ("llamagen_c2i", "llamagen_t2i"))
    assert (labels.condition, labels.num_classes, texts.condition) == ("labels", 20, "text")
    features = TextFeatures(kv=np.ones((9, 32)), lens=np.array([4, 5]))
    found = conditions.resolve(texts, text_features=features)
    assert found.text_maxlen == 120 and found.take([0, 1])["kv"].shape == (2, 16, 32)
    arrays = jax.tree.map(jnp.asarray, found.take([0, 1]))
    context = texts.transformer.encode_condition(arrays, guided=True)
    assert context["visible"].sum(1).tolist() == [4, 5, 4, 5]
    wide = TextFeatures(kv=np.ones((4, 64)), lens=np.array([4]))
    long = TextFeatures(kv=np.ones((121, 32)), lens=np.array([121]))
    for model, given, match in (
        (labels, {"labels": [3, 20]}, "labels 20 are outside the model's 20 classes"),
        (labels, {"text_features": features}, "draws from labels: give exactly that"),
        (texts, {"labels": [3]}, "draws from prompts or text_features"),
        (texts, {"text_features": wide}, "features are 64 wide, the model takes 32"),
        (texts, {"text_features": long}, "a text has 121 tokens, the model takes 120"),
    ):
        with pytest.raises(UserError, match=match):
            conditions.resolve(model, **given)


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
        chex.assert_trees_all_close(scores.untempered().guided(), expected, atol=1e-4)
        chex.assert_trees_all_close(scores.guided(), expected * 2, atol=2e-4)


def test_bfloat16_weights():
    """Products run in the weights' type; what is between the layers and the logits is float32."""
    rough = jax.tree.map(lambda a: a.astype(jnp.bfloat16), transformer("llamagen_c2i"))
    context = rough.encode_condition(jnp.array([1, 2]), guided=True)
    x = jnp.concatenate([context["condition"]] * 2, axis=1)
    block, rotation = stacked.layer(rough.blocks, 0), rough.rotation(context, jnp.arange(2))
    projection = rough.project(block, rotation, x)
    assert projection.dtype == jnp.bfloat16 and rough.dtype == jnp.bfloat16
    after = rough.post_attention(block, x, projection.values().transpose(0, 2, 1, 3))
    chex.assert_type([x, after, rough.plain_logits(after)], jnp.float32)
    exact = transformer("llamagen_c2i")
    tokens = jnp.zeros((2, 63), jnp.int32)
    found, expected = (
        m.teacher_forced(m.encode_condition(jnp.array([1, 2]), guided=True), tokens)
        for m in (rough, exact)
    )
    assert 0 < float(jnp.abs(found - expected).max()) < 0.3


def test_layers_in_separate_arrays():
    """The same logits, and no weight of the products is left stacked."""
    model = transformer("llamagen_c2i")
    context = model.encode_condition(jnp.array([3]), guided=False)
    tokens = jnp.arange(63)[None]
    expected = model.teacher_forced(context, tokens)
    apart = nnx.merge(*nnx.split(model))
    stacked.separate(apart.blocks, apart.once)
    chex.assert_trees_all_close(apart.teacher_forced(context, tokens), expected, atol=1e-5)
    arrays = jax.tree.leaves(apart.blocks, is_leaf=stacked.is_one)
    assert {a.shape[0] for a in arrays} == {3}
    assert all(stacked.is_one(a) for a in arrays if len(a.shape) > 2)
    split = {n.replace("/", ".") for n in parameters.named(model.blocks) if n.endswith("/kernel")}
    assert split == set(model.splits())


def test_shapes_of_the_condition():
    """What `condition_shapes` says is what `encode_condition` takes."""
    for name, width in (("llamagen_c2i", 1), ("llamagen_t2i", 120)):
        model = transformer(name)
        shapes = model.condition_shapes(2)
        context = jax.eval_shape(lambda m, c: m.encode_condition(c, guided=True), model, shapes)
        assert context["condition"].shape == (4, width, 64) and context["visible"].shape[1] == width


# --- configuration --------------------------------------------------------------------------------


def test_published_names():
    given = json.loads((models.LLAMAGEN_FIXTURES / "configs.json").read_text())
    labels, texts = (LlamaGenConfig.from_published(given[n]) for n in ("gpt_c2i", "gpt_t2i"))
    assert (labels.condition, labels.hidden_dim, labels.grid) == ("labels", 192, (8, 8))
    assert (texts.condition, texts.hidden_dim, texts.grid) == ("text", 256, (6, 6))
    assert (texts.text_channels, texts.text_maxlen, texts.num_classes) == (32, 120, 0)
    for one in (labels, texts):
        assert LlamaGenConfig.from_published(json.loads(json.dumps(one.to_published()))) == one
    assert config(resid_dropout_p=0.1, max_batch_size=32, n_kv_head=4) == config()
    assert [c.hidden_dim for c in map(_preset, ("b", "l", "xl", "xxl", "3b"))] == [
        *(2048, 2816, 3584, 4096, 8704)
    ]


def _preset(size: str) -> LlamaGenConfig:
    return registry.preset(f"llamagen-{size}-384").configs["transformer"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_layers": 3}, "unknown name 'n_layers'.*did you mean 'n_layer'"),
        ({"n_kv_head": 2}, "n_kv_head=2 is not supported: released models have as many key heads"),
        ({"model_type": "t2v"}, "model_type is 't2v', it must be c2i or t2i"),
        ({"model_type": ["c2i"]}, "wrong type"),
        ({"dim": 66}, "dim 66 is not a multiple of n_head 4"),
        ({"dim": 24}, "head size 6 .* is not a multiple of 4"),
        ({"block_size": 35}, "block_size 35 is no square"),
        ({"block_size": 10**8}, "block_size is 100000000, it must be at most 65536"),
        ({"cls_token_num": 2}, "cls_token_num is 2, it must be at most 1"),
        ({"num_classes": 0}, "num_classes is 0, it must be at least 1"),
        ({"model_type": "t2i", "caption_dim": 0}, "caption_dim is 0, it must be at least 1"),
        ({"ffn_dim_multiplier": "big"}, "ffn_dim_multiplier is 'big'"),
        ({"ffn_dim_multiplier": 1e5}, "the feed-forward's width is .*at most"),
        ({"class_dropout_prob": 1.0}, "class_dropout_prob 1.0 is outside"),
        ({"rope_base": 0}, "rope_base is 0.0, .*greater than 0"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"),
        ({"n_layer": 10**6}, "n_layer is 1000000, it must be at most 1024"),
    ],
)
def test_wrong_published_values(values, message):
    with pytest.raises(UserError, match=message):
        registry.family("llamagen").parts["transformer"].read(SMALL | values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_k": 257}, "top_k=257: choose 0 .off. to 256"),
        ({"cfg": (1.5, 2.0)}, "cfg lists 2 numbers"),
        ({"cfg_insertion_layer": (-1,)}, "LlamaGen mixes its rows on the logits only"),
        ({"more_smooth": True}, "more_smooth mixes codes of scales"),
        ({"cfg_interval": -2}, "cfg_interval=-2: choose a number of tokens, or -1"),
        ({"cfg_interval": 1.5}, "cfg_interval=1.5: it must be a whole number"),
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


@pytest.mark.parametrize("name", ["var-d16", "infinity-2b"])
def test_models_of_scales_have_no_interval(name):
    whole = registry.preset(name).configs["transformer"]
    with pytest.raises(UserError, match="cfg_interval=3: .* draws whole scales"):
        whole.check_sampling(Sampling(cfg_interval=3))
