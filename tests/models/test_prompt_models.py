"""Janus-Pro and Lumina-mGPT: configurations, what their rows see, and rotations by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from varjax.errors import UserError
from varjax.model import describe
from varjax.models.janus.config import JanusConfig
from varjax.models.janus.transformer import Janus
from varjax.models.llama.decoder import HeadNorm, rotate_half
from varjax.models.lumina import sizes, vocabulary
from varjax.models.lumina.config import LuminaConfig
from varjax.models.lumina.transformer import Lumina
from varjax.models.registry import PRESETS
from varjax.nn import layers, stacked

SMALL = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    text_vocab_size=60,
)
JANUS = JanusConfig(
    **SMALL,
    num_key_value_heads=4,
    vocab_size=20,
    head_hidden=24,
    pad_id=7,
    grid=(2, 3),
    prompt_tokens=6,
)
LUMINA = LuminaConfig(
    **SMALL,
    num_key_value_heads=2,
    model_parallel_size=2,
    vocab_size=20,
    units=(2, 1),
    prompt_tokens=8,
    image_start=30,
    new_line=31,
    size_zero=32,
    first_image=4,
)
MODELS = {"janus": (Janus, JANUS), "lumina": (Lumina, LUMINA)}


# --- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith(("janus", "lumina"))])
def test_published_names_and_back(name):
    config = PRESETS[name].configs["transformer"]
    assert type(config).from_published(config.to_published()) == config


@pytest.mark.parametrize("config", [JANUS, LUMINA])
def test_small_ones_and_back(config):
    assert type(config).from_published(config.to_published()) == config


def test_a_released_file_of_janus():
    """The layout of config.json; sections repeat some sizes, which must agree."""
    given = {
        "architectures": ["MultiModalityCausalLM"],
        "aligner_config": {"cls": "MlpProjector"},
        "gen_aligner_config": {"params": {"depth": 2, "input_dim": 8, "n_embed": 2048}},
        "gen_head_config": {
            "params": {"image_token_embed": 2048, "image_token_size": 16384, "n_embed": 2048}
        },
        "gen_vision_config": {"params": {"image_token_size": 16384, "n_embed": 8}},
        "language_config": {
            **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400},
            **{"max_position_embeddings": 16384, "model_type": "llama", "torch_dtype": "bfloat16"},
        },
    }
    assert JanusConfig.from_published(given) == JanusConfig()
    given["gen_vision_config"]["params"]["n_embed"] = 16
    with pytest.raises(UserError, match="n_embed is 16, elsewhere it is 8"):
        JanusConfig.from_published(given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"language_config": {"hidden_sise": 3}}, "unknown name 'hidden_sise'.*hidden_size"),
        ({"language_config": 3}, "language_config is 3, it must hold names and values"),
        ({"language_config": {"attention_bias": True}}, "attention_bias=True: no released"),
        ({"gen_head_config": {"params": [1]}}, r"params is \[1\], it must hold names and values"),
        ({"gen_aligner_config": {"params": {"depth": 3}}}, "depth is 3, not 2"),
        ({"grid": [6]}, "a height and a width"),
        ({"grid": [0, 2]}, "a height and a width"),
        ({"grid": [300, 300]}, "images of 300x300 tokens: at least 2, at most 65536"),
        ({"prompt_tokens": 16000}, "16000 tokens and 576 image tokens are 16576.*at most 16384"),
        ({"pad_id": 102400}, "pad_id is 102400"),
        ({"surplus": 1}, "unknown name 'surplus'"),
        ({"hidden_size": 64}, "unknown name 'hidden_size': known are language_config, "),
    ],
)
def test_impossible_configurations_of_janus(change, message):
    with pytest.raises(UserError, match=message):
        JanusConfig.from_published(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3 key heads"),
        ({"model_parallel_size": 4}, "2 heads are no multiple of model_parallel_size 4"),
        ({"image_ids": (1, 2)}, "lists 2 ids for 20 codes"),
        ({"new_line": 5}, "must all differ"),
        ({"image_start": 5}, "ids 5 of image start, height and width are those of image tokens"),
        ({"new_line": 34}, "ids 34 of image start"),
        ({"size_zero": 59}, "ids 61, 60 are outside the vocabulary"),
        ({"units": (2, 2, 2)}, "a height and a width"),
    ],
)
def test_impossible_configurations_of_lumina(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(LUMINA, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grammar": [3]}, r"grammar is \[3\], it must hold names and values"),
        ({"grammar": {"boi": "x"}}, "image_start is 'x', it must be a whole number"),
        ({"model": [3]}, r"model is \[3\], it must hold names and values"),
    ],
)
def test_impossible_files_of_lumina(change, message):
    with pytest.raises(UserError, match=message):
        LuminaConfig.from_published(LUMINA.to_published() | change)


def test_released_janus_has_one_grid():
    for name in ("janus-pro-1b", "janus-pro-7b"):
        model = describe(name).with_prompt_tokens(9)
        assert model.with_grid("24x24").config == model.config
        with pytest.raises(UserError, match="grid=12x12: .* 24x24 tokens .384x384 pixels"):
            model.with_grid("12x12")


def test_sizes():
    """Those of the published cropping for an area of 576 units, at most 4 times as long as wide."""
    known = sizes.units_of(576)
    assert (24, 24) in known and (48, 12) in known and (12, 48) in known and (20, 28) in known
    assert (49, 11) not in known and (24, 25) not in known and (23, 23) not in known
    assert sizes.resolve(None, "768x768", (24, 24), 32) == sizes.resolve(None, "768", (24, 24), 32)
    assert sizes.resolve(None, "640x896", (24, 24), 32) == (20, 28)
    assert sizes.resolve(None, "24x16", (2, 3), 8) == (3, 2)  # a codec of one's own
    for wrong in ("768x760", "2048x64", "x", "512"):
        with pytest.raises(UserError, match="HEIGHTxWIDTH in pixels is one of .*768x768"):
            sizes.resolve(None, wrong, (24, 24), 32)
    with pytest.raises(UserError, match="aspect=1.5"):
        LUMINA.with_template(1.5, None)


def test_vocabulary():
    names = {"IMGIMGAZ": 9, "IMGIMGBZ": 7, "IMGIMGCZ": 8, "<eoss>": 3, "IMGIMG": 1, "IMGIMGKZ": 2}
    assert vocabulary.code_of("IMGIMGBAJZ") == 109 and vocabulary.code_of("IMGIMGZ") is None
    assert vocabulary.image_ids(names) == (9, 7, 8)
    for change, message in (
        ({"IMGIMGEZ": 10}, "4 codes have names, but codes 3 have none"),
        ({"IMGIMGACZ": 10}, "code 2 has two names, ids 8 and 10"),
        ({"IMGIMGDZ": 9}, "some codes share an id"),
        ({"IMGIMGDZ": "9"}, "no number of a token"),
    ):
        with pytest.raises(UserError, match=message):
            vocabulary.image_ids(names | change)
    with pytest.raises(UserError, match="no vocabulary with image tokens"):
        vocabulary.image_ids({"a": 1})


@pytest.mark.parametrize(
    ("config", "ids", "message"),
    [
        (JANUS, [1, 60], "prompt ids 60 are outside the vocabulary"),
        (JANUS, [-1, 3], "prompt ids -1 are outside"),
        (JANUS, [5], "at least the first one"),
        (JANUS, [1] * 123, "123 tokens and 6 image tokens are 129"),
        (LUMINA, [1, 30, 34], "image start, height and width, here"),
        (LUMINA, [30, 34, 33], "no text before image start, height and width"),
        (LUMINA, [1, 30, 33, 34], "ask for an image of 1x2 units, the model draws 2x1"),
        (LUMINA, [1, 5, 30, 34, 33], r"prompt ids \[5\] are image tokens"),
        (LUMINA, [1, 30, 2, 30, 34, 33], "image start 30 2 times: a prompt asks for one image"),
    ],
)
def test_prompts_that_cannot_be(config, ids, message):
    with pytest.raises(UserError, match=message):
        config.check_prompt(ids)


# --- steps ----------------------------------------------------------------------------------------


def small(name: str):
    module, config = MODELS[name]
    return module(config, rngs=nnx.Rngs(0))


def prompt(rows: list[list[int]], slots: int) -> dict:
    ids = np.zeros((len(rows), slots), np.int32)
    for row, given in zip(ids, rows, strict=True):
        row[slots - len(given) :] = given
    return {"ids": jnp.asarray(ids), "length": jnp.array([len(r) for r in rows], jnp.int32)}


def test_unconditional_rows_of_janus():
    """First and last id stay, all between them is `pad_id`; pads outside are not seen."""
    model, rows = small("janus"), [[1, 2, 3, 4], [5, 6, 8, 9, 10, 11]]
    context = model.encode_condition(prompt(rows, 6), guided=True)
    table = np.asarray(model.token_embedding[...])
    expected = [[0, 0, 1, 2, 3, 4], rows[1], [0, 0, 1, 7, 7, 4], [5, 7, 7, 7, 7, 11]]
    np.testing.assert_array_equal(context["condition"], table[np.array(expected)])
    np.testing.assert_array_equal(context["visible"].sum(1), [4, 6, 4, 6])
    np.testing.assert_array_equal(context["length"], [4, 6, 4, 6])


def test_unconditional_rows_of_lumina():
    """They see image start, height and width; an image token has another position there."""
    model, rows = small("lumina"), [[1, 2, 30, 34, 33], [1, 2, 3, 30, 34, 33]]
    context = model.encode_condition(prompt(rows, 8), guided=True)
    np.testing.assert_array_equal(context["visible"].sum(1), [5, 6, 3, 3])
    np.testing.assert_array_equal(context["visible"][2:, -3:], True)
    cos, _ = model.rotation(context, jnp.array([-3, 0]))
    np.testing.assert_allclose(cos[:, 0, :, 0], np.cos([[2, 5], [3, 6], [0, 3], [0, 3]]), atol=1e-6)


def test_embedded_tokens_of_lumina():
    """Codes by the ids of their names, and the new line."""
    ids = tuple(np.random.default_rng(0).permutation(np.arange(4, 24)).tolist())
    model = Lumina(dataclasses.replace(LUMINA, image_ids=ids), rngs=nnx.Rngs(0))
    found = model.embed({"condition": jnp.zeros((2, 8, 32))}, jnp.array([[3, 20]]))
    table = np.asarray(model.token_embedding[...])
    np.testing.assert_array_equal(found, np.stack([table[[ids[3], 31]]] * 2))


def test_half_split_rotation():
    x, angle = np.random.default_rng(0).normal(size=(1, 1, 1, 6)).astype(np.float32), [0.3, 1, 2]
    cos, sin = (np.concatenate([f(angle)] * 2).astype(np.float32) for f in (np.cos, np.sin))
    sign = np.array([-1] * 3 + [1] * 3, np.float32)
    found = rotate_half(
        jnp.asarray(x), *(jnp.asarray(a)[None, None, None] for a in (cos, sin * sign))
    )
    for j in range(3):
        a, b = x[..., j], x[..., j + 3]
        turned = a * cos[j] - b * sin[j], a * sin[j] + b * cos[j]
        np.testing.assert_allclose(found[..., [j, j + 3]], np.stack(turned, -1), atol=1e-6)


def test_norm_of_heads_by_shard():
    """Neighbouring heads share a set of weights."""
    norm, x = HeadNorm(2, 4), np.random.default_rng(0).normal(size=(1, 3, 6, 4))
    norm.scale.set_value(jnp.arange(8.0).reshape(2, 4))
    norm.bias.set_value(jnp.arange(8.0).reshape(2, 4) / 10)
    found = norm(jnp.asarray(x, jnp.float32), 6, None)
    for head in range(6):
        of = x[:, :, head]
        plain = (of - of.mean(-1, keepdims=True)) / np.sqrt(of.var(-1, keepdims=True) + 1e-5)
        shard = np.arange(8.0).reshape(2, 4)[head // 3]
        np.testing.assert_allclose(found[:, :, head], plain * shard + shard / 10, atol=1e-5)


def test_norm_of_heads_has_its_own_epsilon():
    """1e-5 as in Chameleon, also where `rms_norm_eps` is another number."""
    rotation = (jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 1, 1, 8)))
    x, found = 1e-3 * jnp.ones((1, 1, 32)).at[..., ::2].set(0), []
    for eps in (1e-5, 1e-1):
        # `norm_after`: no RMS norm in front of the heads
        config = dataclasses.replace(LUMINA, rms_norm_eps=eps, swin_norm=True)
        model = Lumina(config, rngs=nnx.Rngs(0))
        found.append(model.project(stacked.layer(model.blocks, 0), rotation, x).k)
    assert float(jnp.abs(found[0]).max()) > 0
    np.testing.assert_array_equal(found[0], found[1])


def test_attention_of_groups():
    """Query head n reads head n // 2: the same as with keys and values repeated."""
    rng = np.random.default_rng(0)
    shapes = ((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    mask = jnp.asarray(rng.random((2, 1, 5, 7)) < 0.7).at[..., 0].set(True)
    whole = layers.dense_attention(q, jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1), mask)
    np.testing.assert_allclose(layers.dense_attention(q, k, v, mask), whole, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(name):
    """A prompt in more slots gives the same logits."""
    model = small(name)
    rows = [[1, 2, 30, 34, 33]]
    tokens, found = jnp.array([[3, 1, 4, 1]]), []
    for slots in (5, 8):
        context = model.encode_condition(prompt(rows, slots), guided=True)
        found.append(model.teacher_forced(context, tokens))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
