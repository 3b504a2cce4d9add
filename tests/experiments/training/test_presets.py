"""Presets: settings that can be, by the number of pictures, with flags that are given before."""

import pytest

from experiments.training.presets import PRESETS, preset
from experiments.training.settings import FAMILIES, TrainingSettings


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_possible(name, family):
    """More pictures are trained for longer, up to a bound; the fewest fill a batch."""
    least = PRESETS[name].least
    few, more, most = (preset(name, family, least * by, "cpu") for by in (1, 100, 1000))
    settings = TrainingSettings.for_family(data="none", **few | {"family": family})
    assert max(settings.vqvae_batch_size, settings.var_batch_size) < 0.95 * least
    for stage in ("vqvae_steps", "var_steps"):
        assert few[stage] < more[stage] == most[stage]
    assert preset(name, family, least, "gpu") == few | {"dtype": "bfloat16"}
