"""Janus-Pro and Lumina-mGPT: configurations, what their rows see, and rotations by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.often import often
from varjax.core.errors import UserError
from varjax.models import teacher_forcing
from varjax.models.janus import Janus, JanusConfig
from varjax.models.lumina import Lumina, LuminaConfig, image_ids, units_for, units_of

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
        ({"language_config": {"attention_bias": True}}, "attention_bias=True is not"),
        ({"gen_aligner_config": {"params": {"depth": 3}}}, "depth is 3, not 2"),
        ({"grid": [6]}, "a height and a width"),
        ({"grid": [300, 300]}, "images of 300x300 tokens: at least 2, at most 65536"),
        ({"prompt_tokens": 16000}, "16000 tokens and 576 image tokens are 16576.*at most 16384"),
        ({"pad_id": 102400}, "pad_id is 102400"),
        ({"hidden_size": 64}, "unknown name 'hidden_size': known are language_config, "),
    ],
)
def test_impossible_configurations_of_janus(change, message):
    with pytest.raises(UserError, match=message):
        JanusConfig.from_published(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "heads 4 is not a multiple of num_key_value_heads 3"),
        ({"model_parallel_size": 4}, "heads 2 is not a multiple of model_parallel_size 4"),
        ({"image_ids": (1, 2)}, "lists 2 ids for 20 codes"),
        ({"new_line": 5}, "must all differ"),
        ({"image_start": 5}, "must all differ"),
        ({"size_zero": 59}, "ids 61, 60 are outside the vocabulary"),
        ({"units": (2, 2, 2)}, "a height and a width"),
    ],
)
def test_impossible_configurations_of_lumina(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(LUMINA, **change)


def test_sizes():
    """Those of the published cropping for an area of 576 units, at most 4 times as long as wide."""
    known = units_of(576)
    assert (24, 24) in known and (48, 12) in known and (12, 48) in known and (20, 28) in known
    assert (49, 11) not in known and (24, 25) not in known and (23, 23) not in known
    assert units_for(None, "768x768", (24, 24), 32) == units_for(None, "768", (24, 24), 32)
    assert units_for(None, "640x896", (24, 24), 32) == (20, 28)
    assert units_for(None, "24x16", (2, 3), 8) == (3, 2)  # a codec of one's own
    for wrong in ("768x760", "2048x64", "x", "512"):
        with pytest.raises(UserError, match="HEIGHTxWIDTH in pixels is one of .*768x768"):
            units_for(None, wrong, (24, 24), 32)
    with pytest.raises(UserError, match="aspect=1.5"):
        LUMINA.with_template(1.5, None)


def test_vocabulary():
    names = {"IMGIMGAZ": 9, "IMGIMGBZ": 7, "IMGIMGCZ": 8, "<eoss>": 3, "IMGIMG": 1, "IMGIMGKZ": 2}
    assert image_ids(names) == (9, 7, 8)
    for change, message in (
        ({"IMGIMGEZ": 10}, "codes 3 have no name"),
        ({"IMGIMGACZ": 10}, "IMGIMGACZ has the id 10"),
        ({"IMGIMGDZ": 9}, "some codes share an id"),
        ({"IMGIMGDZ": "9"}, "give one number for each code"),
    ):
        with pytest.raises(UserError, match=message):
            image_ids(names | change)
    with pytest.raises(UserError, match="codes 0 have no name IMGIMG"):
        image_ids({"a": 1})


@pytest.mark.parametrize(
    ("config", "ids", "message"),
    [
        (JANUS, [1, 60], "prompt ids 60 are outside the vocabulary"),
        (JANUS, [5], "at least the first one"),
        (JANUS, [1] * 123, "123 tokens and 6 image tokens are 129"),
        (LUMINA, [1, 30, 34], "image start, height and width, here"),
        (LUMINA, [30, 34, 33], "have no text before image start, height"),
        (LUMINA, [1, 30, 33, 34], "ask for an image of 1x2 units, the model draws 2x1"),
        (LUMINA, [1, 5, 30, 34, 33], r"have image tokens \[5\]"),
        (LUMINA, [1, 30, 2, 30, 34, 33], r"have image tokens \[30\].* asks for one image"),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", often(("lumina",), MODELS))
def test_padding_changes_nothing(name):
    """A prompt in more slots gives the same logits."""
    model = small(name)
    rows = [[1, 2, 30, 34, 33]]
    tokens, found = jnp.array([[3, 1, 4, 1]]), []
    for slots in (5, 8):
        context = model.encode_condition(prompt(rows, slots), guided=True)
        found.append(teacher_forcing.of_tokens(model, context, tokens))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
