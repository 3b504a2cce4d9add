"""PSNR and SSIM of pictures as bytes, in float64, by the definitions of the published scripts."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from scipy import ndimage

from varjax.errors import UserError

SIGMA, RADIUS = 1.5, 5  # of the Gaussian window of SSIM (Wang et al. 2004): 11 pixels
UNIFORM = 7  # pixels of scikit-image's default window
K1, K2 = 0.01, 0.03

Picture = UInt8[np.ndarray, "H W 3"]


def psnr(a: Picture, b: Picture) -> float:
    """Peak signal-to-noise ratio in dB for a peak of 255; infinite if the pictures are equal."""
    error = np.square(a.astype(np.float64) - b).mean() / 255**2
    return 10 * math.log10(1 / error) if error else math.inf


class SSIM(NamedTuple):
    """Structural similarity by three definitions: means over channels and positions, for values
    0..1.

    torchmetrics: Gaussian window, edges mirrored, all positions. skimage_gauss: the same window,
      only where it fits (as `varjax.metrics.ssim`). skimage_7x7: scikit-image's default, uniform
      windows with sample covariances, only where they fit.
    """

    torchmetrics: float
    skimage_gauss: float
    skimage_7x7: float


def ssim(a: Picture, b: Picture) -> SSIM:
    """Structural similarity by all three definitions, which differ by up to 0.08 on the same pair.

    Raises:
      UserError: a side is shorter than the window of 11 pixels.
    """
    if min(a.shape[:2]) <= 2 * RADIUS:
        raise UserError(
            f"pictures of {a.shape[0]}x{a.shape[1]} pixels: SSIM needs more than {2 * RADIUS} on"
            " each side"
        )
    x, y = a / 255.0, b / 255.0
    offsets = np.arange(-RADIUS, RADIUS + 1)
    window = np.exp(-np.square(offsets / SIGMA) / 2)
    gauss = _map(x, y, window / window.sum(), 1.0)
    uniform = _map(x, y, np.full(UNIFORM, 1 / UNIFORM), UNIFORM**2 / (UNIFORM**2 - 1))
    border = UNIFORM // 2
    return SSIM(
        torchmetrics=float(gauss.mean()),
        skimage_gauss=float(gauss[RADIUS:-RADIUS, RADIUS:-RADIUS].mean()),
        skimage_7x7=float(uniform[border:-border, border:-border].mean()),
    )


def _map(
    x: Float[np.ndarray, "H W 3"], y: Float[np.ndarray, "H W 3"], window: np.ndarray, sample: float
) -> Float[np.ndarray, "H W 3"]:
    """SSIM of every position. sample: what (co)variances are multiplied with."""

    def mean(values: np.ndarray) -> np.ndarray:
        for axis in (0, 1):
            values = ndimage.correlate1d(values, window, axis=axis, mode="mirror")
        return values

    mx, my = mean(x), mean(y)
    vx, vy = sample * (mean(x * x) - mx * mx), sample * (mean(y * y) - my * my)
    vxy = sample * (mean(x * y) - mx * my)
    c1, c2 = K1**2, K2**2
    luminance = (2 * mx * my + c1) / (mx * mx + my * my + c1)
    return luminance * (2 * vxy + c2) / (vx + vy + c2)
