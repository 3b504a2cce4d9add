"""The published protocols by name: what the numbers of a paper were computed with, and pictures as
the network sees them, at 299x299 pixels.

Each of the three ways to that size is a matrix per axis, made on the host, and two matrix products
on the device; they differ in where they sample and how they shrink, by far more than rounding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real, UInt8

from varjax.models.judges.inception import SIDE
from varjax.storage.values import require

SPLIT_SIZE = 5000  # of ADM's Inception score
BY_FEATURES = {  # metrics of sets of pictures, by the extractor whose features they need
    "inception": ("fid", "sfid", "is", "precision", "recall"),
    "demo": ("demo_frechet", "class_agreement"),
}
METRICS = (*BY_FEATURES["inception"], "psnr", "ssim", "lpips", *BY_FEATURES["demo"])
DEMO = {  # in place of a protocol
    "name": "demo",
    "source": "a classifier of the demo's classes: no FID, and comparable with nothing else",
    "resize": "none",
    "demo_frechet": "Frechet distance of the features before the classifier's last layer",
    "class_agreement": "part of the pictures that it takes for the class they were asked for",
}
BYTES_PER_CALL = 2**28  # of pictures in float32 that are resized at a time


def _bilinear(source: np.ndarray, size: int) -> Float[np.ndarray, "out in"]:
    """Rows that mix the two neighbours of a place, both clamped to the picture."""
    low = np.floor(source).astype(int)
    part = (source - low).astype(np.float32)
    rows, matrix = np.arange(len(source)), np.zeros((len(source), size), np.float32)
    matrix[rows, np.minimum(low, size - 1)] += 1 - part
    matrix[rows, np.minimum(low + 1, size - 1)] += part
    return matrix


@lru_cache(maxsize=32)
def half_pixel(size: int, out: int) -> Float[np.ndarray, "out in"]:
    """torch: centres of pixels lie at halves; no antialiasing, clamped at the edges, in float32."""
    scale = np.float32(size) / np.float32(out)
    places = (np.arange(out, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    return _bilinear(np.maximum(places, np.float32(0)), size)


@lru_cache(maxsize=32)
def corner(size: int, out: int) -> Float[np.ndarray, "out in"]:
    """TensorFlow 1: the place of a pixel is its corner; no antialiasing; in float32."""
    scale = np.float32(size) / np.float32(out)
    return _bilinear(np.arange(out, dtype=np.float32) * scale, size)


@lru_cache(maxsize=32)
def pillow_bicubic(size: int, out: int) -> Float[np.ndarray, "out in"]:
    """Pillow: bicubic, its support widened where it shrinks (antialiasing). The matrix is what
    Pillow makes of the identity. `MissingExtra` without Pillow."""
    image = require("PIL.Image", extra="eval", purpose="resizing as clean-fid does")
    identity = image.fromarray(np.eye(size, dtype=np.float32))
    resized = identity.resize((out, size), image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(resized).T)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Preparation and metrics that the numbers of a published program are computed with.

    source: the program.
    metrics: what the program computes. The other metrics are ADM's, on features of pictures that
      are prepared in this way.
    path, resize: name of the way to the network's size, and its definition in words, for reports.
    matrix: (side in, side out) -> float32 [out, in], which resizes along one axis.
    normalise: from resized values 0..255 to what the network takes.
    mixes_sizes: it takes sets of pictures of several sizes, and resizes each on its own.
    """

    source: str
    metrics: tuple[str, ...]
    path: str
    resize: str
    matrix: Callable[[int, int], np.ndarray]
    normalise: Callable[[Array], Array]
    mixes_sizes: bool = False

    @property
    def fit(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Function that brings a picture of any size to a size that the network takes; None:
        pictures of a set need one size."""
        return self.resized_on_host if self.mixes_sizes else None

    def resized(self, images: Real[Array, "B H W 3"]) -> Float[Array, "B 299 299 3"]:
        """Pictures at 299x299 pixels, values 0..255, width first as Pillow does; sides that are
        right stay as they are. Values are not clipped."""
        x = images.astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            for axis, product in ((2, "bhwc,pw->bhpc"), (1, "bhwc,ph->bpwc")):
                if x.shape[axis] != SIDE:
                    x = jnp.einsum(product, x, self.matrix(x.shape[axis], SIDE))
        return x

    def resized_on_host(
        self, picture: UInt8[np.ndarray, "H W 3"]
    ) -> Float[np.ndarray, "299 299 3"]:
        """`resized` of one picture."""
        x = picture.astype(np.float32)
        for axis, product in ((1, "hwc,pw->hpc"), (0, "hwc,ph->pwc")):
            if x.shape[axis] != SIDE:
                x = np.einsum(product, x, self.matrix(x.shape[axis], SIDE), optimize=True)
        return x

    def describe(self, split_size: int) -> Mapping:
        """Description of the protocol for a report. split_size: pictures per split of the score."""
        return {
            "source": self.source,
            "path": self.path,
            "resize": self.resize,
            "inception_score": {
                "logits": "without bias",
                "splits": f"consecutive blocks of {split_size} in the order of the file",
                "split_size": split_size,
            },
            "precision_recall": {"neighbours": 3, "distances": "float64", "features": "pool"},
            "covariance": "N - 1, float64; nothing is added to singular ones",
        }


PROTOCOLS = {
    "adm": Protocol(
        source="evaluator of openai/guided-diffusion (ADM)",
        metrics=BY_FEATURES["inception"],
        path="tf1",
        resize="bilinear from corners (TensorFlow 1), no antialiasing; (x - 128) / 128",
        matrix=corner,
        normalise=lambda x: (x - 128) / 128,
    ),
    "pytorch-fid": Protocol(
        source="pytorch-fid 0.3.0",
        metrics=("fid",),
        path="pfid",
        resize="bilinear, half-pixel centres, no antialiasing; x / 127.5 - 1",
        matrix=half_pixel,
        normalise=lambda x: 2 * (x / 255) - 1,
    ),
    "clean-fid": Protocol(
        source="clean-fid 0.1.35, mode clean",
        metrics=("fid",),
        path="clean",
        resize="Pillow's bicubic in float32, antialiased, clipped to 0..255, not rounded; (x - 128)"
        " / 128",
        matrix=pillow_bicubic,
        normalise=lambda x: (jnp.clip(x, 0, 255) - 128) / 128,
        mixes_sizes=True,
    ),
}


def batch_size(height: int, width: int) -> int:
    """Pictures that may be resized at a time: large ones take more memory than the network."""
    one = 4 * 3 * (height * width + height * SIDE + SIDE * SIDE)
    return max(1, BYTES_PER_CALL // one)
