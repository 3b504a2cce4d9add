"""Pictures as the network sees them: the three published ways to 299x299 pixels.

Each way is a matrix per axis, made on the host, and two matrix products on the device; they differ
in where they sample and in what they do when they shrink, by far more than rounding.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real, UInt8

from varjax.models.judges.inception import SIDE
from varjax.storage.values import require

BYTES_PER_CALL = 2**28  # of pictures in float32 that are resized at a time


class Preparation(NamedTuple):
    """Steps from the bytes of a picture to the input of the network.

    definition: in words, for reports.
    matrix: (side in, side out) -> float32 [out, in], which resizes along one axis.
    normalise: from resized values 0..255 to what the network takes.
    """

    definition: str
    matrix: Callable[[int, int], np.ndarray]
    normalise: Callable[[Array], Array]


def _bilinear(source: np.ndarray, size: int) -> Float[np.ndarray, "out in"]:
    """Rows that mix the two neighbours of a place, both clamped to the picture."""
    low = np.floor(source).astype(int)
    part = (source - low).astype(np.float32)
    rows, matrix = np.arange(len(source)), np.zeros((len(source), size), np.float32)
    matrix[rows, np.minimum(low, size - 1)] += 1 - part
    matrix[rows, np.minimum(low + 1, size - 1)] += part
    return matrix


def half_pixel(size: int, out: int) -> Float[np.ndarray, "out in"]:
    """torch: centres of pixels lie at halves; no antialiasing, clamped at the edges. In float32 as
    the original."""
    scale = np.float32(size) / np.float32(out)
    places = (np.arange(out, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    return _bilinear(np.maximum(places, np.float32(0)), size)


def corner(size: int, out: int) -> Float[np.ndarray, "out in"]:
    """TensorFlow 1: the place of a pixel is its corner; no antialiasing. In float32 as the
    original."""
    scale = np.float32(size) / np.float32(out)
    return _bilinear(np.arange(out, dtype=np.float32) * scale, size)


def pillow_bicubic(size: int, out: int) -> Float[np.ndarray, "out in"]:
    """Pillow: bicubic, its support widened where it shrinks (antialiasing). The matrix is what
    Pillow makes of the identity. `MissingExtra` without Pillow."""
    image = require("PIL.Image", extra="eval", purpose="resizing as clean-fid does")
    identity = image.fromarray(np.eye(size, dtype=np.float32))
    resized = identity.resize((out, size), image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(resized).T)


PREPARATIONS = {
    "pfid": Preparation(
        "bilinear, half-pixel centres, no antialiasing; x / 127.5 - 1",
        half_pixel,
        lambda x: 2 * (x / 255) - 1,
    ),
    "tf1": Preparation(
        "bilinear from corners (TensorFlow 1), no antialiasing; (x - 128) / 128",
        corner,
        lambda x: (x - 128) / 128,
    ),
    "clean": Preparation(
        "Pillow's bicubic in float32, antialiased, clipped to 0..255, not rounded; (x - 128) / 128",
        pillow_bicubic,
        lambda x: (jnp.clip(x, 0, 255) - 128) / 128,
    ),
}


@functools.lru_cache(maxsize=32)
def matrix(preparation: str, size: int) -> Float[np.ndarray, "out in"]:
    """The matrix that resizes a side of `size` pixels, as one of `PREPARATIONS` does."""
    return PREPARATIONS[preparation].matrix(size, SIDE)


def resize(images: Real[Array, "B H W 3"], preparation: str) -> Float[Array, "B 299 299 3"]:
    """Pictures at 299x299 pixels, values 0..255, width first as Pillow does; sides that are right
    stay as they are. Values are not clipped."""
    x = images.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        for axis, product in ((2, "bhwc,pw->bhpc"), (1, "bhwc,ph->bpwc")):
            if x.shape[axis] != SIDE:
                x = jnp.einsum(product, x, matrix(preparation, x.shape[axis]))
    return x


def resized(
    picture: UInt8[np.ndarray, "H W 3"], preparation: str
) -> Float[np.ndarray, "299 299 3"]:
    """`resize` of one picture, on the host."""
    x = picture.astype(np.float32)
    for axis, product in ((1, "hwc,pw->hpc"), (0, "hwc,ph->pwc")):
        if x.shape[axis] != SIDE:
            x = np.einsum(product, x, matrix(preparation, x.shape[axis]), optimize=True)
    return x


def prepare(images: Real[Array, "B H W 3"], preparation: str) -> Float[Array, "B 299 299 3"]:
    """Input of the network for pictures, prepared by one of `PREPARATIONS`."""
    return PREPARATIONS[preparation].normalise(resize(images, preparation))


def batch_size(height: int, width: int) -> int:
    """Pictures that may be resized at a time: large ones take more memory than the network."""
    one = 4 * 3 * (height * width + height * SIDE + SIDE * SIDE)
    return max(1, math.floor(BYTES_PER_CALL / one))
