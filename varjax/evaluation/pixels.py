"""PSNR and SSIM of pictures as bytes, in float64, by the definitions of torchmetrics."""

import math

import numpy as np
from jaxtyping import Float, UInt8
from scipy import ndimage

from varjax.errors import UserError

SIGMA, RADIUS = 1.5, 5  # of the Gaussian window of SSIM (Wang et al. 2004): 11 pixels
K1, K2 = 0.01, 0.03

Picture = UInt8[np.ndarray, "H W 3"]


def psnr(a: Picture, b: Picture) -> float:
    """Peak signal-to-noise ratio in dB for a peak of 255; infinite if the pictures are equal."""
    error = np.square(a.astype(np.float64) - b).mean() / 255**2
    return 10 * math.log10(1 / error) if error else math.inf


def check_size(height: int, width: int) -> None:
    """`UserError` for pictures with a side shorter than the window of SSIM."""
    if min(height, width) <= 2 * RADIUS:
        raise UserError(
            f"pictures of {height}x{width} pixels: SSIM needs more than {2 * RADIUS} on each side"
        )


def ssim(a: Picture, b: Picture) -> float:
    """Structural similarity for values 0..1: Gaussian window, edges mirrored, mean over channels
    and all positions. `UserError` as of `check_size`."""
    check_size(*a.shape[:2])
    window = np.exp(-np.square(np.arange(-RADIUS, RADIUS + 1) / SIGMA) / 2)
    window /= window.sum()

    def mean(values: Float[np.ndarray, "H W 3"]) -> Float[np.ndarray, "H W 3"]:
        for axis in (0, 1):
            values = ndimage.correlate1d(values, window, axis=axis, mode="mirror")
        return values

    x, y = a / 255.0, b / 255.0
    mx, my = mean(x), mean(y)
    vx, vy = mean(x * x) - mx * mx, mean(y * y) - my * my
    vxy = mean(x * y) - mx * my
    c1, c2 = K1**2, K2**2
    luminance = (2 * mx * my + c1) / (mx * mx + my * my + c1)
    return float((luminance * (2 * vxy + c2) / (vx + vy + c2)).mean())
