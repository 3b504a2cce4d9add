"""Base of transformers of both kinds: next-scale and next-token."""

from collections.abc import Callable
from typing import ClassVar, Self

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from varjax import sampling as sampling_lib
from varjax.errors import UserError
from varjax.nn.layers import Split
from varjax.sampling import Sampling, Scores


def text_shapes(config, images: int, length: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of what `TextFeatures.take` gives, without negative texts: these double what is read
    and change nothing later. length: None: the most that the model takes."""
    length = config.text_maxlen if length is None else length
    return {
        "kv": jax.ShapeDtypeStruct((images, length, config.text_channels), np.float32),
        "length": jax.ShapeDtypeStruct((images,), np.int32),
        "unconditional": jax.ShapeDtypeStruct((images,), bool),
    }


class Transformer(nnx.Module):
    """Base of `NextScaleTransformer` and `NextTokenTransformer`, which say what `config` has.
    `head` is the last linear layer, `blocks` are the stacked layers.

    `sequence(one_slot)` is the order of an image, as the cache sees it: scales or tokens. one_slot:
    whether one slot stands for the whole condition where the model allows it. `code_map(codec)` is
    height, width and channels of the latent map that a codec of this configuration decodes.
    `condition_shapes(images, text_tokens)` are shapes and types of what `encode_condition` takes
    for so many images. text_tokens: padded length of texts; None: the most that the model takes.
    """

    token_name: ClassVar[str] = "tokens"  # what a token is called in files
    once: ClassVar[tuple[str, ...]] = ()  # parts of the blocks that `encode_condition` uses
    # training: what the body of a scan over layers is before it is differentiated
    differentiated: Callable[[Callable], Callable] | None = None
    model_axis: str | None = None  # axis of the mesh that heads and weights are divided over

    def over(self, axis: str) -> Self:
        """The same parameters in a transformer whose step functions run on every device of this
        axis of a mesh, each with its share of the weights that `splits` names."""
        divided = nnx.merge(*nnx.split(self))
        divided.model_axis = axis
        return divided

    @property
    def dtype(self):
        """The type of the weights, which is the type that matrix products run in."""
        return self.head.kernel.get_value().dtype  # an array, or a shape of an abstract model

    def sample(
        self, scores: Scores, keys: Array, sampling: Sampling, implementation: str | None = None
    ) -> tuple[Array, Array | None]:
        """Draws tokens [B, T, ...]; the results are those of `varjax.sampling.sample`."""
        return sampling_lib.sample(scores, keys, sampling, implementation)

    def splits(self) -> dict[str, Split]:
        """Stacked parameters of the blocks that are divided over heads or the feed-forward's width;
        the others are whole on every device. None at all: the model is not divided."""
        return {}

    # --- tokens in files --------------------------------------------------------------------------

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
