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
from varjax.codecs.vq.model import VQ, VQConfig
from varjax.errors import UserError
from varjax.models import registry

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


def test_codes_without_unit_length(codec):
    """Then the nearest one is that of the smallest distance, and codes are decoded as they are."""
    config = VQConfig.from_published({"codebook_size": 3, "ch": 32, "l2_norm": False})
    other = jax.tree.map(lambda leaf: leaf, codec)
    other.config = config
    other.embedding.set_value(jnp.array([[4.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    z = jnp.array([[2.0, 0.0], [0.0, 3.0]])
    assert other.nearest(z).tolist() == [2, 1] and other.codebook()[0, 0] == 4
    other.config = VQConfig.from_published({"codebook_size": 3, "ch": 32})
    assert other.nearest(z).tolist() == [0, 1] and other.codebook()[0, 0] == 1


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
        ({"ch": 48}, "ch is 48, which 32 normalisation groups do not divide"),
        ({"ch_mult": []}, "ch_mult is \\[\\], 0 levels: it needs 1 to 10 levels"),
        ({"ch_mult": [1, 0]}, "each at least 1"),
        ({"ch_mult": [1, 10**6]}, "ch . ch_mult is 128000000"),
        ({"encoder_ch_mult": [1, 2], "decoder_ch_mult": [1, 4]}, "another name says \\(1, 2\\)"),
        ({"l2_norm": True, "codebook_l2_norm": False}, "codebook_l2_norm is False"),
        ({"codebook_size": 0}, "codebook_size is 0"),
        ({"num_res_blocks": 17}, "num_res_blocks is 17, it must be at most 16"),
        ({"codebook_embed_dim": 2.5}, "must be a whole number"),
    ],
)
def test_wrong_values(values, message):
    with pytest.raises(UserError, match=message):
        VQConfig.from_published(values)


def test_published_size_by_shape():
    """The released model, on pictures of 384 pixels: 24 x 24 tokens."""
    preset = registry.preset("llamagen-xl-384")
    part = registry.family(preset.family).parts["codec"]
    module = part.abstract(preset.configs["codec"])
    images = jax.ShapeDtypeStruct((2, 384, 384, 3), "float32")
    chex.assert_shape(jax.eval_shape(VQ.images_to_tokens, module, images), (2, 576))
    with pytest.raises(UserError, match="multiples of 16"):
        jax.eval_shape(VQ.encode, module, jax.ShapeDtypeStruct((1, 250, 256, 3), "float32"))
