"""Tokens of Infinity as files hold them: the bits of the image tokenizer.

Letters: N images, L tokens, C bits of a token, d bits of a code. Without patches both are the same.
"""

import numpy as np

from varjax.codecs.maps import patchify, unpatchify
from varjax.errors import UserError
from varjax.models.infinity.config import InfinityConfig


def to_file(config: InfinityConfig, tokens: np.ndarray) -> np.ndarray:
    """uint8 [N, L, C] -> bits of the image tokenizer, uint8 [N, L_vae, d]: with patches, four
    times as many rows of a quarter of the bits, row-major on the finer maps."""
    schedule = config.schedule
    parts = []
    for (h, w), start in zip(schedule.maps, schedule.starts, strict=True):
        maps = np.asarray(tokens[:, start : start + h * w], np.uint8).reshape(-1, h, w, config.bits)
        parts.append(unpatchify(maps, config.patch).reshape(len(maps), -1, config.codebook_dim))
    return np.concatenate(parts, axis=1)


def from_file(
    config: InfinityConfig, array: np.ndarray, num_images: int, scales: int
) -> np.ndarray:
    """uint8 [N, L, C] from bits of the image tokenizer that reach at least through the given
    scales; 0 beyond."""
    schedule, patch, bits = config.schedule, config.patch, config.codebook_dim
    least, most = (schedule.ends[max(0, n - 1)] * patch**2 for n in (scales, schedule.num_scales))
    fits = array.ndim == 3 and array.shape[::2] == (num_images, bits)
    if not fits or not (least if scales else 0) <= array.shape[1] <= most:
        raise UserError(
            f"bits have the shape {array.shape}, needed is ({num_images}, {least} to {most}, "
            f"{bits}): images, bits of at least the first {scales} scales, bits per code"
        )
    if (
        not (array.dtype == bool or np.issubdtype(array.dtype, np.integer))
        or not np.isin(array, (0, 1)).all()
    ):
        raise UserError(f"bits are {array.dtype}, needed are integers that are 0 or 1")
    padded = np.zeros((num_images, most, bits), np.uint8)
    padded[:, : array.shape[1]] = array
    parts = []
    for (h, w), start in zip(schedule.maps, schedule.starts, strict=True):
        rows = padded[:, start * patch**2 : (start + h * w) * patch**2]
        maps = rows.reshape(num_images, h * patch, w * patch, bits)
        parts.append(patchify(maps, patch).reshape(num_images, h * w, config.bits))
    return np.concatenate(parts, axis=1)
