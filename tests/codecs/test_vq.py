"""LlamaGen's image tokenizer against arrays of the original implementation, and its configuration.

Tolerances are for float32 on CPU, about ten times the distance of the reference from float64.
"""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import models_under_test as models
from varjax.codecs.vq import VQConfig
from varjax.core.errors import UserError

LATENT, IMAGE = 1e-4, 3e-4


@pytest.fixture(scope="module")
def codec():
    return models.fixture_model("llamagen_c2i").codec


@pytest.fixture(scope="module")
def arrays():
    return models.llamagen_fixture("vq_io")


def _first(array) -> np.ndarray:
    """Channels last to channels first."""
    return np.moveaxis(np.asarray(array), -1, 1)


def test_images_to_tokens(codec, arrays):
    images = jnp.asarray(arrays["image_u8"] / np.float32(127.5) - 1)
    latent, tokens = jax.jit(lambda c, x: (c.encode(x), c.images_to_tokens(x)))(codec, images)
    chex.assert_trees_all_close(_first(latent), arrays["enc_h"], rtol=0, atol=LATENT)
    chex.assert_trees_all_equal(np.asarray(tokens), arrays["enc_indices"].reshape(2, -1))


def test_tokens_to_images(codec, arrays):
    """A map of 12 x 8 tokens, given row by row; not clipped, and as pictures."""
    rows, grid = arrays["indices"].reshape(2, -1), arrays["indices"].shape[1:]

    @jax.jit
    def run(codec, rows):
        codes = codec.code_map(rows, grid)
        return codes, codec.decode(codes, clip=False), codec.tokens_to_images(rows, grid)

    codes, plain, images = run(codec, rows)
    chex.assert_trees_all_close(_first(codes), arrays["codebook_entries"], rtol=0, atol=1e-6)
    chex.assert_trees_all_close(_first(plain), arrays["decoded"], rtol=0, atol=IMAGE)
    expected = arrays["decoded"].clip(-1, 1)
    chex.assert_trees_all_close(_first(images), expected, rtol=0, atol=IMAGE)
    assert (expected != arrays["decoded"]).any()


# --- configuration --------------------------------------------------------------------------------


def test_published_names():
    """Of the constructor and of the fixtures; VQ-8 has one level less than VQ-16."""
    given = json.loads((models.LLAMAGEN_FIXTURES / "configs.json").read_text())["vq"]
    assert given.items() <= VQConfig.from_published(given).to_published().items()
    levels = [1, 2, 2, 4]
    config = VQConfig.from_published(
        {"encoder_ch_mult": levels, "decoder_ch_mult": levels, "codebook_l2_norm": True}
        | {"codebook_show_usage": True, "commit_loss_beta": 0.25, "dropout_p": 0.0}
    )
    assert config == VQConfig(ch_mult=(1, 2, 2, 4)) and config.downsample == 8
    assert VQConfig.from_published(config.to_published()) == config
    assert VQConfig().downsample == 16 and VQConfig().vocab_size == 16384


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"codebook_sise": 5}, "unknown name 'codebook_sise'.*did you mean 'codebook_size'"),
        ({"ch_mult": []}, "ch_mult is \\[\\], 0 levels: it needs 1 to 10 levels"),
        ({"ch_mult": [1, 10**6]}, "ch . ch_mult is 128000000"),
        ({"encoder_ch_mult": [1, 2], "decoder_ch_mult": [1, 4]}, "another name says \\(1, 2\\)"),
    ],
)
def test_wrong_values(values, message):
    with pytest.raises(UserError, match=message):
        VQConfig.from_published(values)
