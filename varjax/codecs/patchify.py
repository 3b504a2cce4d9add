"""Spatial patchify: p by p cells of a map become one transformer token of p * p times the width.

The channel order is that of pixel unshuffle: token channel c * p * p + p * dy + dx is map channel c
at (p * y + dy, p * x + dx). Both functions take numpy and jax arrays and return what they were
given; p = 1 changes nothing.
"""

import numpy as np
from jaxtyping import Array, Shaped

AnyArray = Array | np.ndarray


def patchify(
    x: Shaped[AnyArray, "B ph pw C"], side: int = 2
) -> Shaped[AnyArray, "B ph//{side} pw//{side} {side}**2*C"]:
    """`side` by `side` cells per token."""
    if side == 1:
        return x
    batch, height, width, channels = x.shape
    height, width = height // side, width // side
    x = x.reshape(batch, height, side, width, side, channels)
    return x.transpose(0, 1, 3, 5, 2, 4).reshape(batch, height, width, channels * side**2)


def unpatchify(
    x: Shaped[AnyArray, "B h w ppC"], side: int = 2
) -> Shaped[AnyArray, "B {side}*h {side}*w ppC//{side}**2"]:
    """The inverse of `patchify`: pixel shuffle."""
    if side == 1:
        return x
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height, width, channels // side**2, side, side)
    x = x.transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, height * side, width * side, channels // side**2)
