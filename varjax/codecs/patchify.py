"""Maps as tokens: rows of all maps, and spatial patchify.

Patchify makes p by p cells of a map one transformer token of p * p times the width, p = 1 changes
nothing. The channel order is that of pixel unshuffle: token channel c * p * p + p * dy + dx is map
channel c at (p * y + dy, p * x + dx). `patchify` and `unpatchify` take numpy and jax arrays and
return what they were given.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

AnyArray = Array | np.ndarray


def flatten_maps(maps: Sequence[Shaped[Array, "B _ _ C"]]) -> Shaped[Array, "B L C"]:
    """Positions of all maps, one map after the other, each row-major."""
    rows = [m.reshape(m.shape[0], m.shape[1] * m.shape[2], m.shape[3]) for m in maps]
    return jnp.concatenate(rows, axis=1)


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
