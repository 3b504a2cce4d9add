"""What transformers of all kinds share: next-scale and next-token."""

from typing import Any, ClassVar, Self

import numpy as np
from flax import nnx

from varjax.errors import UserError
from varjax.nn.split import Split


class Transformer(nnx.Module):
    """Base of `NextScaleTransformer` and `NextTokenTransformer`. `head` is the last linear layer,
    `blocks` are the stacked layers, `config` has what the kind of model says."""

    token_name: ClassVar[str] = "tokens"  # what a token is called in files
    once: ClassVar[tuple[str, ...]] = ()  # parts of the blocks that `encode_condition` uses
    model_axis: str | None = None  # axis of the mesh that heads and weights are divided over

    def over(self, axis: str) -> Self:
        """Return the same parameters in a transformer whose step functions run on every device of
        this axis of a mesh, each with its share of the weights that `splits` names."""
        divided = nnx.merge(*nnx.split(self))
        divided.model_axis = axis
        return divided

    @property
    def dtype(self):
        """The type of the weights, which is the type that matrix products run in."""
        return self.head.kernel.get_value().dtype  # an array, or a shape of an abstract model

    def condition_shapes(self, images: int, text_tokens: int | None = None) -> Any:
        """Shapes and types of what `encode_condition` takes for so many images. text_tokens: padded
        length of texts; None: the most that the model takes."""
        raise NotImplementedError

    @staticmethod
    def splits() -> dict[str, Split]:
        """Stacked parameters of the blocks that are divided over heads or the feed-forward's width;
        the others are whole on every device."""
        raise NotImplementedError

    # --- tokens in files --------------------------------------------------------------------------

    def no_tokens(self, images: int) -> np.ndarray:
        """Tokens as they are drawn, all 0, for programs that take forced ones and get none."""
        return np.zeros((images, self.config.schedule.total_tokens), np.int32)

    def tokens_to_file(self, tokens: np.ndarray) -> np.ndarray:
        """Drawn tokens of N images as `arrays.npz` has them."""
        return np.asarray(tokens, np.int32)

    def tokens_from_file(self, array: np.ndarray, num_images: int, scales: int) -> np.ndarray:
        """The inverse, for tokens that are forced: int32 [N, L]; `UserError` if the array does not
        fit.

        scales: how many scales take them; it may end there.
        """
        config = self.config
        wanted = (num_images, config.schedule.total_tokens)
        if array.shape != wanted or not np.issubdtype(array.dtype, np.integer):
            raise UserError(f"tokens are {array.dtype} {array.shape}, needed are integers {wanted}")
        if array.min() < 0 or array.max() >= config.vocab_size:
            raise UserError(
                f"tokens reach from {array.min()} to {array.max()}, allowed is 0 to "
                f"{config.vocab_size - 1}"
            )
        return array.astype(np.int32)
