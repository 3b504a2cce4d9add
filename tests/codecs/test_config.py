"""VQVAE configuration: published names and validation."""

import json

import pytest

from varjax.codecs.vqvae import VQVAEConfig
from varjax.core.errors import UserError
from varjax.core.sequence import Schedule


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
    "groups": ({"ch": 48}, "ch 48 is not a multiple of the normalisation groups, 32"),
    "two": ({"patch_nums": [1, 2], "v_patch_nums": [1, 3]}, "differ: give one of them"),
    "kernel": ({"quant_conv_ks": 2}, "must be odd"),
    "large": ({"z_channels": 10**12}, "z_channels is .*at most 10000000"),
    "blocks": ({"num_res_blocks": 10**12}, "num_res_blocks is .*at most 16"),
    "epsilon": ({"group_norm_eps": -1.0}, "group_norm_eps is -1.0"),
    "beta": ({"beta": float("inf")}, "beta is inf, it must be a finite number"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_values(values, message):
    with pytest.raises(UserError, match=message):
        VQVAEConfig.from_published(values)
