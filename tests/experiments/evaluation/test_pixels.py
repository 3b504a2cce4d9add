"""PSNR and SSIM against torchmetrics."""

import math

import pytest

from experiments.evaluate import pairs
from tests.experiments.evaluation import recipe
from varjax.core.errors import UserError

KNOWN = recipe.expected()["psnr_ssim"]["per_pair"]


@pytest.mark.parametrize("pair", range(8))
def test_psnr_and_ssim(pair):
    a, b = (recipe.arrays("lpips")[f"{x}_{pair}"] for x in "ab")
    assert math.isclose(pairs.psnr(a, b), float(KNOWN["tm_psnr"][pair]), abs_tol=1e-4)
    assert math.isclose(pairs.ssim(a, b), KNOWN["tm_ssim"][pair], abs_tol=1e-4)


def test_small_pictures_are_refused():
    with pytest.raises(UserError, match="10x64 pixels: SSIM needs more than 10"):
        pairs.check_window(10, 64)
