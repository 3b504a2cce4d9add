"""Base of transformers of both kinds: next-scale and next-token."""

from collections.abc import Callable
from typing import ClassVar, Self

from flax import nnx
from jaxtyping import Array

from varjax.core import sampling as sampling_lib
from varjax.core.layers import Split
from varjax.core.sampling import Sampling, Scores


class Transformer(nnx.Module):
    """Base of `NextScaleTransformer` and `NextTokenTransformer`, which say what `config` has.
    `head` is the last linear layer, `blocks` are the stacked layers.

    `sequence(one_slot)` is the order of an image, as the cache sees it: scales or tokens. one_slot:
    whether one slot stands for the whole condition where the model allows it. `code_map(codec)` is
    height, width and channels of the latent map that a codec of this configuration decodes.
    `condition_shapes(images, text_tokens)` are shapes and types of what `encode_condition` takes
    for so many images. text_tokens: padded length of texts; None: the most that the model takes.
    """

    token_name: ClassVar[str] = "tokens"  # what a token is called in files: see `token_arrays`
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
        """Draws tokens [B, T, ...]; the results are those of `varjax.core.sampling.sample`."""
        return sampling_lib.sample(scores, keys, sampling, implementation)

    def splits(self) -> dict[str, Split]:
        """Stacked parameters of the blocks that are divided over heads or the feed-forward's width;
        the others are whole on every device. None at all: the model is not divided."""
        return {}
