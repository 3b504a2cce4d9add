"""PSNR and SSIM against torchmetrics."""

import math

import numpy as np
import pytest

from experiments.evaluate import inputs, pairs
from tests.experiments.evaluation import recipe
from varjax.core.errors import UserError

KNOWN = recipe.expected()["psnr_ssim"]["per_pair"]


@pytest.mark.parametrize("pair", range(8))
def test_psnr_and_ssim(pair):
    a, b = (recipe.arrays("lpips")[f"{x}_{pair}"] for x in "ab")
    assert math.isclose(pairs.psnr(a, b), float(KNOWN["tm_psnr"][pair]), abs_tol=1e-4)
    assert math.isclose(pairs.ssim(a, b), KNOWN["tm_ssim"][pair], abs_tol=1e-4)


def test_small_pictures_are_refused(tmp_path):
    np.savez(tmp_path / "small.npz", arr_0=np.zeros((1, 10, 64, 3), np.uint8))
    small = inputs.open_set("--samples", str(tmp_path / "small.npz"))
    with pytest.raises(UserError, match="10x64 pixels: SSIM needs more than 10"):
        pairs.pair(small, small, ("ssim",), None)
