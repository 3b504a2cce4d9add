"""Tokens as arrays, in the form in which they are drawn and in that of files."""

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from varjax.core.errors import UserError
from varjax.core.maps import patchify, unpatchify
from varjax.core.sequence import Schedule


class TokenArrays:
    """Tokens that are numbers of codes, int32 [N, L]. config: of the transformer."""

    def __init__(self, config):
        self.config = config

    def no_tokens(self, images: int) -> np.ndarray:
        """Tokens in the form in which they are drawn, all 0: the argument of programs that take
        forced tokens, where none are forced."""
        return np.zeros((images, self.config.total_tokens), np.int32)

    def image_tokens(self, codec: nnx.Module, images: Float[Array, "N H W 3"]) -> np.ndarray:
        """Tokens of pictures in [-1, 1], which the codec encodes, in the form in which they are
        drawn: [N, L] or [N, L, bits]."""
        encode = jax.jit(type(codec).images_to_tokens)
        return np.asarray(encode(codec, images), np.int32)

    def tokens_to_file(self, tokens: np.ndarray) -> np.ndarray:
        """Drawn tokens of N images as `arrays.npz` has them."""
        return np.asarray(tokens, np.int32)

    def tokens_from_file(self, array: np.ndarray, num_images: int, scales: int) -> np.ndarray:
        """Tokens to be forced, int32 [N, L], from an array of `tokens_to_file`; `UserError` if the
        array does not fit.

        scales: how many scales are forced; the array may end after them.
        """
        config = self.config
        wanted = (num_images, config.total_tokens)
        if array.shape != wanted or not np.issubdtype(array.dtype, np.integer):
            raise UserError(f"tokens are {array.dtype} {array.shape}, needed are integers {wanted}")
        if array.min() < 0 or array.max() >= config.vocab_size:
            raise UserError(
                f"tokens reach from {array.min()} to {array.max()}, allowed is 0 to "
                f"{config.vocab_size - 1}"
            )
        return array.astype(np.int32)


class BitArrays(TokenArrays):
    """Tokens that are rows of bits, uint8 [N, L, bits]."""

    def no_tokens(self, images: int) -> np.ndarray:
        return np.zeros((images, self.config.total_tokens, self.config.bits), np.uint8)

    def image_tokens(self, codec: nnx.Module, images: Float[Array, "N H W 3"]) -> np.ndarray:
        patch = self.config.patch
        maps = Schedule(tuple((h * patch, w * patch) for h, w in self.config.schedule.maps))
        encode = jax.jit(type(codec).images_to_bits, static_argnums=2)
        bits = np.asarray(encode(codec, images, maps))
        return self.tokens_from_file(bits, len(bits), maps.num_scales)

    def tokens_to_file(self, tokens: np.ndarray) -> np.ndarray:
        """Bits of the codec, uint8 [N, L * patch**2, codebook_dim], row-major on the finer maps."""
        schedule, patch, parts = self.config.schedule, self.config.patch, []
        for (h, w), start in zip(schedule.maps, schedule.starts, strict=True):
            rows = np.asarray(tokens[:, start : start + h * w], np.uint8)
            maps = unpatchify(rows.reshape(len(rows), h, w, -1), patch)
            parts.append(maps.reshape(len(maps), -1, self.config.codebook_dim))
        return np.concatenate(parts, axis=1)

    def tokens_from_file(self, array: np.ndarray, num_images: int, scales: int) -> np.ndarray:
        """uint8 [num_images, L, bits]; bits that the array lacks are 0."""
        schedule, patch, bits = self.config.schedule, self.config.patch, self.config.codebook_dim
        least, most = (
            n * patch**2 for n in (schedule.ends[max(0, scales - 1)], schedule.total_tokens)
        )
        fits = array.ndim == 3 and array.shape[::2] == (num_images, bits)
        if not fits or not (least if scales else 0) <= array.shape[1] <= most:
            raise UserError(
                f"bits have the shape {array.shape}, needed is ({num_images}, {least} to {most}, "
                f"{bits}): images, bits of at least the first {scales} scales, bits per code"
            )
        whole = array.dtype == bool or np.issubdtype(array.dtype, np.integer)
        if not whole or not np.isin(array, (0, 1)).all():
            raise UserError(f"bits are {array.dtype}, needed are integers that are 0 or 1")
        padded, parts = np.zeros((num_images, most, bits), np.uint8), []
        padded[:, : array.shape[1]] = array
        for (h, w), start in zip(schedule.maps, schedule.starts, strict=True):
            rows = padded[:, start * patch**2 : (start + h * w) * patch**2]
            maps = patchify(rows.reshape(num_images, h * patch, w * patch, bits), patch)
            parts.append(maps.reshape(num_images, h * w, -1))
        return np.concatenate(parts, axis=1)


# by `Transformer.token_name`
FORMS: dict[str, type[TokenArrays]] = {"tokens": TokenArrays, "bits": BitArrays}
