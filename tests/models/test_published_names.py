"""Configurations under their published names: presets, defaults, values that cannot be."""

import json

import pytest

from varjax.core.errors import UserError
from varjax.models import registry
from varjax.models.var import VARConfig
from varjax.storage.manifest import recommended_sampling


@pytest.mark.parametrize("name", registry.PRESETS)
def test_presets_round_trip_through_published_names(name):
    preset = registry.preset(name)
    family = registry.family(preset.family)
    assert list(preset.configs) == list(family.tree)
    for name, config in preset.configs.items():
        written = json.loads(json.dumps(config.to_published()))
        assert family.parts[name].read(written) == config
    family.check(preset.configs)
    preset.configs["transformer"].check_sampling(recommended_sampling(preset.sampling))


def test_defaults_are_those_of_the_published_constructor():
    config = VARConfig.from_published({"L": 680, "note": "x", "vae": "v", "drop_rate": 0.1})
    assert (config.num_classes, config.depth, config.embed_dim) == (1000, 16, 1024)
    assert not config.attn_l2_norm and not config.shared_aln
    assert config.to_published()["patch_nums"] == [1, 2, 3, 4, 5, 6, 8, 10, 13, 16]


@pytest.mark.parametrize(
    "values, match",
    [
        ({"dpeth": 3}, "unknown name 'dpeth'.*did you mean 'depth'"),
        ({"depth": 2.5}, "depth is 2.5, it must be a whole number"),
        ({"mlp_ratio": "4"}, "must be a number"),
        ({"shared_aln": 1}, "must be true or false"),
        ({"patch_nums": [[1, 2, 3]]}, "must list"),
        ({"patch_nums": [True, 2]}, "must list"),
        ({"patch_nums": [1, 10**12]}, "height of a token map=1000000000000: choose 1 to 4096"),
        ({"embed_dim": 10**12}, "embed_dim is .*at most 10000000"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio is nan"),
        ({"mlp_ratio": 10**400}, "mlp_ratio is .*must be a number"),
    ],
)
def test_wrong_published_values(values, match):
    with pytest.raises(UserError, match=match):
        registry.family("var").parts["transformer"].read(values)
