"""Presets: settings that can be, by the number of pictures, with flags that are given before."""

import pytest

from experiments.training.presets import PRESETS, preset
from experiments.training.settings import FAMILIES, TrainingSettings
from varjax.core.errors import UserError


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_possible(name, family):
    """More pictures are trained for longer, up to a bound; the fewest fill a batch."""
    least = PRESETS[name].least
    few, many, more = (preset(name, family, least * by, "cpu") for by in (1, 100, 1000))
    settings = TrainingSettings.for_family(data="none", **few | {"family": family})
    assert max(settings.vqvae_batch_size, settings.var_batch_size) < 0.95 * least
    assert few["vqvae_steps"] < many["vqvae_steps"] == more["vqvae_steps"]
    assert few["var_steps"] < many["var_steps"] == more["var_steps"]
    on_gpu = preset(name, family, least, "gpu")
    assert few | {"dtype": "bfloat16"} == on_gpu and few["dtype"] == "float32"


def test_too_few_pictures():
    for name, count, advice in (("base", 1000, "choose preset=small"), ("tiny", 3, "give more")):
        with pytest.raises(UserError, match=f"preset={name} is for .* there are {count}: {advice}"):
            preset(name, "var", count, "cpu")
