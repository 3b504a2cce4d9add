"""Tokenizers that only decode: Chameleon's and Janus-Pro's, against arrays of the original
implementations (float32 on CPU; tolerances as in `test_vq`), and Chameleon's configuration."""

import json

import chex
import jax
import numpy as np
import pytest

from tests import models_under_test as models
from varjax.codecs.vq import ChameleonVQConfig
from varjax.core.errors import UserError

IMAGE = 3e-4
PUBLISHED = {"n_embed": 8192, "embed_dim": 256}
DDCONFIG = {
    "double_z": False,
    "z_channels": 256,
    "resolution": 512,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 128,
    "ch_mult": [1, 1, 2, 2, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}


def _pictures(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [1, T] of a picture with their grid, and the picture that the original decodes."""
    if name == "janus_tiny":
        arrays = models.janus_fixture("janus_tiny_gen")
        return arrays["gen_tokens"][:1].reshape(1, *arrays["grid"]), arrays["decoded"]
    arrays = models.lumina_fixture("lumina_tiny_gen")
    return arrays["vq_indices"][None], arrays["decoded"]


@pytest.mark.slow
@pytest.mark.parametrize("name", models.PROMPT_MODELS)
def test_tokens_to_images(name):
    """Of the ported checkpoints, at a height and width that differ in Lumina's case."""
    codec = models.fixture_model(name).codec
    tokens, expected = _pictures(name)
    rows, grid = tokens.reshape(1, -1), tokens.shape[1:]
    found = jax.jit(lambda c, t: c.decode(c.code_map(t, grid), clip=False))(codec, rows)
    chex.assert_trees_all_close(np.moveaxis(found, -1, 1), expected, rtol=0, atol=IMAGE)


# --- configuration --------------------------------------------------------------------------------


def test_published_layout():
    """That of vqgan.yaml, with notes of its training, and of the fixture."""
    given = {**PUBLISHED, "ddconfig": DDCONFIG, "lossconfig": {"target": "loss"}}
    config = ChameleonVQConfig.from_published(given)
    assert config == ChameleonVQConfig() and config.downsample == 16
    assert (config.vocab_size, config.code_channels, config.has_encoder) == (8192, 256, False)
    content = json.loads((models.LUMINA_FIXTURES / "lumina_tiny_config.json").read_text())
    small = ChameleonVQConfig.from_published(content["vqgan"])
    assert small.vocab_size == 128 and small.downsample == 2
    for one in (config, small):
        assert ChameleonVQConfig.from_published(json.loads(json.dumps(one.to_published()))) == one


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_resolutions": [100]}, r"attn_resolutions has \[100\].*\[512, 256, 128, 64, 32\]"),
        ({"double_z": True}, "double_z=True is not supported: released models have False"),
        ({"z_chanels": 4}, "unknown name 'z_chanels'.*did you mean 'z_channels'"),
    ],
)
def test_wrong_values(values, message):
    with pytest.raises(UserError, match=message):
        ChameleonVQConfig.from_published({**PUBLISHED, "ddconfig": {**DDCONFIG, **values}})
