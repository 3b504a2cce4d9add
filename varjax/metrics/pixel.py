"""How close two sets of pictures, or of tokens, are: PSNR, SSIM, token agreement.

Letters: N images, H and W pixels, C channels. Images are float in [0, 1].
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from varjax.errors import UserError
from varjax.io.extras import require

Images = Float[Array | np.ndarray, "N H W C"]
Tokens = Integer[Array | np.ndarray, "..."]
WINDOW = 11  # side of the Gaussian window of SSIM in pixels (Wang et al. 2004), deviation 1.5


def psnr(a: Images, b: Images) -> Float[np.ndarray, " N"]:
    """Peak signal-to-noise ratio of each pair in dB, for a peak of 1; infinite if identical."""
    a, b = _pair(a, b)
    pix = require("dm_pix", extra="eval", purpose="PSNR")
    return np.asarray(pix.psnr(a, b))


def ssim(a: Images, b: Images) -> Float[np.ndarray, " N"]:
    """Structural similarity of each pair, mean over channels and all full 11 x 11 windows.

    Images smaller than the window are compared with a window of their own shorter side.
    """
    a, b = _pair(a, b)
    pix = require("dm_pix", extra="eval", purpose="SSIM")
    return np.asarray(pix.ssim(a, b, filter_size=min(WINDOW, *a.shape[1:3])))


def token_agreement(a: Tokens, b: Tokens) -> Float[np.ndarray, " N"]:
    """Fraction of positions of each pair with equal tokens (or bits).

    Raises:
      UserError: for different shapes or no tokens at all.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or not a.size:
        raise UserError(f"tokens of shape {a.shape} and {b.shape} cannot be compared")
    return (a == b).reshape(len(a), -1).mean(1)


def _pair(a, b):
    """Both sets as float32 arrays of one shape."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    if a.shape != b.shape or a.ndim != 4 or not a.size:
        raise UserError(
            f"images of shape {a.shape} and {b.shape} cannot be compared: both must be [N, H, W, C]"
        )
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (a, b)):
        raise UserError(f"images of type {a.dtype} and {b.dtype}: give floats in [0, 1]")
    return a.astype(jnp.float32), b.astype(jnp.float32)
