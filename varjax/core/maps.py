"""Maps [B, h, w, C] of codes and latents: resized, in patches.

Resizing is a matrix product whose results equal torch's, which the original models use.
`jax.image.resize` has another bicubic constant (-0.5) and another border rule, so its pictures and
tokens differ. The resizings used here are separable and linear: one small matrix per axis is
computed on the host, exact for every pair of sizes, and applied with an einsum.

Patchify turns p by p cells of a map into one transformer token of p * p times the width; p = 1
changes nothing. The channel order is that of pixel unshuffle: token channel c * p * p + p * dy + dx
is map channel c at (p * y + dy, p * x + dx). `patchify` and `unpatchify` take numpy and jax arrays
and return what they were given.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

AnyArray = Array | np.ndarray
HIGHEST = jax.lax.Precision.HIGHEST
CUBIC_CONSTANT = -0.75


@lru_cache(maxsize=256)
def area_matrix(source: int, target: int) -> np.ndarray:
    """float32 [target, source]: adaptive average pooling along one axis.

    Output i is the mean of the inputs floor(i * source / target) up to, not including,
    ceil((i + 1) * source / target); neighbouring windows overlap when the sizes do not divide.
    """
    matrix = np.zeros((target, source), np.float32)
    for i in range(target):
        start, stop = i * source // target, -(-(i + 1) * source // target)
        matrix[i, start:stop] = 1 / (stop - start)
    matrix.flags.writeable = False
    return matrix


@lru_cache(maxsize=256)
def bicubic_matrix(source: int, target: int) -> np.ndarray:
    """float32 [target, source]: bicubic interpolation along one axis.

    Constant -0.75, half-pixel centres, no antialiasing, borders clamped (weights of neighbours
    outside the axis are added to the border element). The identity when the sizes agree.
    """
    centre = (np.arange(target) + 0.5) * source / target - 0.5
    left = np.floor(centre).astype(np.int64)
    cells = [np.clip(left + shift, 0, source - 1) for shift in range(-1, 3)]
    a, past = CUBIC_CONSTANT, centre - left  # in [0, 1), past neighbour 0 of -1, 0, 1, 2
    near = [((a + 2) * x - (a + 3)) * x * x + 1 for x in (past, 1 - past)]  # |x| <= 1
    far = [((a * x - 5 * a) * x + 8 * a) * x - 4 * a for x in (1 + past, 2 - past)]
    return _matrix(source, cells, [far[0], *near, far[1]])


@lru_cache(maxsize=256)
def bilinear_matrix(source: int, target: int) -> np.ndarray:
    """float32 [target, source]: linear interpolation along one axis, up or down.

    Half-pixel centres, no antialiasing (shrinking looks at two neighbours only), borders clamped.
    The identity when the sizes agree. So does torch's trilinear mode with a map of one frame.
    """
    lower, upper, weight = _linear_neighbours(source, target)
    return _matrix(source, [lower, upper], [1 - weight, weight])


def _matrix(source: int, cells: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [target, source], read-only: row i adds up `weights[n][i]` at column
    `cells[n][i]`."""
    matrix = np.zeros((len(cells[0]), source), np.float64)
    for cell, weight in zip(cells, weights, strict=True):
        np.add.at(matrix, (np.arange(len(cell)), cell), weight)
    matrix = matrix.astype(np.float32)
    matrix.flags.writeable = False
    return matrix


def bilinear_neighbours(
    source: tuple[int, int], target: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear interpolation of a map as a gather: int32 [4, T] source cells (row-major) of every
    target cell and float32 [4, T] weights. Half-pixel centres, borders clamped."""
    (top, bottom, down), (left, right, across) = (
        _linear_neighbours(s, t) for s, t in zip(source, target, strict=True)
    )
    rows, columns = np.stack([top, top, bottom, bottom]), np.stack([left, right, left, right])
    heights = np.stack([1 - down, 1 - down, down, down])
    widths = np.stack([1 - across, across, 1 - across, across])
    cells = rows[:, :, None] * source[1] + columns[:, None]
    weights = heights[:, :, None] * widths[:, None]
    return cells.reshape(4, -1).astype(np.int32), weights.reshape(4, -1).astype(np.float32)


def _linear_neighbours(source: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lower cell, upper cell, weight of the upper one) along one axis, each [target]."""
    centre = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
    lower = np.floor(centre).astype(np.int64)
    return lower, np.minimum(lower + 1, source - 1), centre - lower


def resize(
    x: Float[Array, "B h w C"], rows: Float[AnyArray, "p h"], columns: Float[AnyArray, "q w"]
) -> Float[Array, "B p q C"]:
    """Applies one matrix per axis, with full float32 products on every device."""
    x = jnp.einsum("bhwc,ph->bpwc", x, rows, precision=HIGHEST)
    return jnp.einsum("bpwc,qw->bpqc", x, columns, precision=HIGHEST)


def _resize_to(
    matrix: Callable[[int, int], np.ndarray], x: Float[Array, "B h w C"], size: tuple[int, int]
) -> Float[Array, "B p q C"]:
    """Resizes maps to `size` = (height, width). matrix: of an axis, made from its two sizes."""
    if x.shape[1:3] == tuple(size):
        return x
    return resize(x, matrix(x.shape[1], size[0]), matrix(x.shape[2], size[1]))


MATRICES = {"area": area_matrix, "bicubic": bicubic_matrix, "bilinear": bilinear_matrix}
# (maps [B, h, w, C], (height, width)) -> maps of that size
resize_area = partial(_resize_to, area_matrix)
resize_bicubic = partial(_resize_to, bicubic_matrix)
resize_bilinear = partial(_resize_to, bilinear_matrix)


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
