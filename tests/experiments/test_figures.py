"""What `experiments.plan` says of quality: figures of recipes, of that policy, model and budget."""

import pytest

from experiments.recipes import figures
from varjax.models.loading import describe

PRESET = {"preset": "d30-table3"}


@pytest.mark.parametrize(
    ("model", "policy", "given", "budget", "said"),
    [
        ("infinity-2b", "heatkv", {}, 0.10117, "PSNR 25.40 (infinity-2b, recipe heatkv-coco): "),
        ("infinity-2b", "heatkv", {}, 0.15, figures.UNKNOWN),
        ("infinity-2b", "scalekv", {}, None, figures.UNKNOWN),
        ("var-d30", "amskv", PRESET, None, "FID 2.09, IS 330.50"),
        ("var-d30", "amskv", {}, None, figures.UNKNOWN),
        ("llamagen-xl-384", "headkv", {}, 1 / 6, "FID 2.71, IS 276.43 (llamagen-xl-384, recipe"),
        ("llamagen-xl-384", "headkv", {"window": "4"}, 1 / 6, figures.UNKNOWN),
        ("demo-eight", "learned", {}, 0.1, "KL 0.120, PSNR 27.16 (demo-eight, recipe learned-"),
        ("demo-llamagen", "streaming", {}, 0.25, "learned-demo, with sinks=4)"),
        ("llamagen-b-256", "heatkv", {}, 0.1, figures.UNKNOWN),
    ],
)
def test_figures(model, policy, given, budget, said):
    found = figures.lines(describe(model), policy, given, budget, budget or 0.25)
    assert said in found[0] and found[0].startswith("quality   ")
