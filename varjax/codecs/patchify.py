"""Spatial patchify: two by two cells of a map become one transformer token of four times the width.

The channel order is that of pixel unshuffle: token channel c * 4 + 2 * dy + dx is map channel c at
(2 * y + dy, 2 * x + dx). Both functions take numpy and jax arrays and return what they were given.
"""

import numpy as np
from jaxtyping import Array, Shaped

AnyArray = Array | np.ndarray
SIDE = 2  # cells of a token along each axis


def patchify(x: Shaped[AnyArray, "B 2*h 2*w C"]) -> Shaped[AnyArray, "B h w 4*C"]:
    """Two by two cells per token."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // SIDE, SIDE, width // SIDE, SIDE, channels)
    return x.transpose(0, 1, 3, 5, 2, 4).reshape(
        batch, height // SIDE, width // SIDE, channels * SIDE**2
    )


def unpatchify(x: Shaped[AnyArray, "B h w 4*C"]) -> Shaped[AnyArray, "B 2*h 2*w C"]:
    """The inverse of `patchify`: pixel shuffle."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height, width, channels // SIDE**2, SIDE, SIDE)
    return x.transpose(0, 1, 4, 2, 5, 3).reshape(
        batch, height * SIDE, width * SIDE, channels // SIDE**2
    )
