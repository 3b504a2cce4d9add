"""VQVAE configuration: published names and validation."""

import json
from pathlib import Path

import chex
import jax
import pytest
from flax import nnx

from varjax.codecs.vqvae.model import VQVAE, VQVAEConfig
from varjax.errors import UserError
from varjax.schedule import Schedule

FIXTURES = Path(__file__).parents[1] / "fixtures" / "var"


@pytest.mark.parametrize("name", ["vae_small", "vae_full"])
def test_published_names_round_trip(name):
    values = json.loads((FIXTURES / name / "config.json").read_text())
    config = VQVAEConfig.from_published(values)
    assert values.items() <= config.to_published().items()
    assert VQVAEConfig.from_published(config.to_published()) == config


def test_published_variants():
    config = VQVAEConfig.from_published(
        {"v_patch_nums": [1, [2, 3], (4, 5)], "L": 27, "test_mode": True}
    )
    assert config.schedule == Schedule(((1, 1), (2, 3), (4, 5)))
    assert config.to_published()["patch_nums"] == [1, [2, 3], [4, 5]]
    assert config.image_size == (64, 80) and config.downsample == 16
    assert json.loads(json.dumps(config.to_published())) == config.to_published()


WRONG = {
    "unknown": (
        {"vocab_sise": 5},
        "unknown name 'vocab_sise': known are .*did you mean 'vocab_size'",
    ),
    "patch_nums": ({"patch_nums": [1, "x"]}, "must list sides"),
    "shrinking": ({"patch_nums": [1, 4, 2]}, "the last map must be the largest"),
    "groups": ({"ch": 48}, "ch is 48, which 32 normalisation groups do not divide"),
    "empty": ({"vocab_size": 0}, "vocab_size is 0"),
    "levels": ({"ch_mult": []}, "0 levels: it needs 1 to 10 levels"),
    "multipliers": ({"ch_mult": [1, "a"]}, "must list whole numbers"),
    "type": ({"using_sa": "yes"}, "using_sa is 'yes', it must be true or false"),
    "two": ({"patch_nums": [1, 2], "v_patch_nums": [1, 3]}, "differ: give one of them"),
    "kernel": ({"quant_conv_ks": 2}, "must be odd"),
    "boolean": ({"patch_nums": [True, 2]}, "must list sides"),
    "boolean size": ({"vocab_size": True}, "must be a whole number"),
    "large side": ({"patch_nums": [1, 5000]}, "too large"),
    "large": ({"z_channels": 10**12}, "z_channels is .*at most 10000000"),
    "wide": ({"ch": 32 * 10**5, "ch_mult": [1, 10**5]}, "ch . ch_mult is"),
    "blocks": ({"num_res_blocks": 10**12}, "num_res_blocks is .*at most 16"),
    "deep": ({"ch_mult": [1] * 1000}, "1000 levels: it needs 1 to 10"),
    "phis": ({"share_quant_resi": 10**9}, "share_quant_resi is"),
    "kernel size": ({"quant_conv_ks": 10**9 + 1}, "quant_conv_ks is"),
    "epsilon": ({"group_norm_eps": -1.0}, "group_norm_eps is -1.0"),
    "beta": ({"beta": float("inf")}, "beta is inf, it must be a finite number"),
    "beta NaN": ({"beta": float("nan")}, "beta is nan"),
    "beta sign": ({"beta": -0.1}, "beta is -0.1, .*at least 0"),
    "resi": ({"quant_resi": float("nan")}, "quant_resi is nan"),
    "share": ({"share_quant_resi": -1}, "share_quant_resi is -1"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_values(values, message):
    with pytest.raises(UserError, match=message):
        VQVAEConfig.from_published(values)


def test_wrong_values_given_directly():
    for name in ("quant_resi", "beta", "group_norm_eps"):
        with pytest.raises(UserError, match=f"{name} is nan"):
            VQVAEConfig(**{name: float("nan")})


def test_published_size_by_shape():
    """The released model: ch 160, 4096 codes of 32 channels, 680 tokens per 256x256 image."""
    config = VQVAEConfig()
    model = nnx.eval_shape(lambda: VQVAE(config, rngs=nnx.Rngs(0)))
    tokens = nnx.eval_shape(lambda m, x: m.images_to_tokens(x), model, _images(256))
    chex.assert_shape(tokens, (2, 680))
    chex.assert_shape(model.quantizer.phi_kernel, (4, 3, 3, 32, 32))
    with pytest.raises(UserError, match="multiples of 16"):
        nnx.eval_shape(lambda m, x: m.encode(x), model, _images(250))


def _images(side):
    return jax.ShapeDtypeStruct((2, side, side, 3), "float32")
