"""The interface of transformers that draw images token by token, in raster order.

The engine knows stages, layers and the cache; everything else is a step that the transformer
brings, in the order in which it is called:

    encode_condition(condition, *, guided)
        Once per image, for all rows: `condition` float32 [R, M, D], its embedded tokens; `visible`
        bool [R, M], the tokens that are no padding; and what else `rotation` needs.
    rotation(context, index)
        Once per token: cosines and sines that rotate tokens `index` [T], float32 [T, H], in the
        layout of `Projection`. They have a leading axis over rows only where rows differ.
    project(block, rotation, x)
        Finished queries, keys and values of a layer: queries carry the attention scale, they and
        keys are rotated. What answers as a `Projection` will do; Q query heads may share N heads of
        keys.
    post_attention(block, x, attended, drop)
        [R, T, D] the rest of the layer, given the attention output [R, T, Q, H].
        drop(branch, number): applied to what branch `number` adds; training passes dropout.
    logits(x, index, sampling)
        `Scores` of image token `index`, from the output of the layers [R, 1, D] for the token
        before it, with temperature and guidance to be applied; of several from [R, T, D], with
        `index` [T, 1].
    sample(scores, keys, sampling, implementation)
        Tokens [B, T], as `varjax.core.sampling.sample` gives them.
    embed(context, tokens)
        [R, T, D] inputs of the next step: both rows of an image have the same tokens [B, T].

`plain_logits(x)` gives float32 logits [R, T, V] of every row, before temperature and guidance
(`teacher_forcing`). Where `condition_is_one_slot`, `condition_slot(values, visible)` gives the key
and the value [R, N, 1, H] of the one slot that stands for the condition's M tokens in a layer, and
what is added to its score, float32 [R].

The condition is what the cache holds first: M tokens, causal (`condition_mask`); its last one gives
the first image token. Image tokens are counted from 0 and the condition's from -M to -1, so that a
token's `index` does not depend on the condition's length. Every step works for any number of tokens
at once: the condition, one token, or all tokens of an image.

Rows: first come the conditional rows of all images. With guidance their unconditional rows follow
(R = 2 B), without it there are none (R = B). Codes and what becomes of them belong to the codec
(`codes`, `code_map`, `decode`). A new family writes one subclass.

Letters: B images, R rows, M tokens of the condition, T tokens, L image tokens, Q query heads, N
heads of keys and values, H head size, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from varjax.core import stacked
from varjax.core.sequence import TokenSequence
from varjax.core.transformer import Transformer


def as_it_is(branch: Array, number: int) -> Array:
    """Returns what a branch adds, without dropout."""
    return branch


class TokenLayers:
    """The layers for one token of every row, in the steps of the engine: here `project` and
    `post_attention` of the transformer, in plain JAX. What is faster is a subclass
    (`varjax.models.llama.token_products.TokenProducts`); the residual stream and a layer's weights
    then have forms of its own."""

    def __init__(self, transformer: "NextTokenTransformer"):
        self.transformer = transformer

    def start(
        self, x: Float[Array, "R 1 D"], rotation: PyTree[Array]
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """The residual stream before the first layer, and the token's rotation."""
        return x, rotation

    def weights(self, index: int) -> PyTree[Array]:
        """What `project` and `rest` take of layer `index`."""
        return stacked.layer(self.transformer.blocks, index)

    def project(
        self,
        weights: PyTree[Array],
        rotation: PyTree[Array],
        x: PyTree[Array],
        rows: int,
        total: Callable[[], PyTree[Array]],
    ) -> tuple[tuple[Array, Array, Array], Array | None]:
        """Finished queries [R, Q, H], keys and values [R, N, H], and the sum of queries
        [R, N, H] if it is made here.

        rows: R. total: gives the running sum that queries may be added to (`TokenStep.summed`).
        """
        p = self.transformer.project(weights, rotation, x)
        q, k, v = (a[:, :, 0] for a in (p.queries(), p.keys(), p.values()))
        return (q, k, v), None

    def rest(
        self, weights: PyTree[Array], x: PyTree[Array], attended: Float[Array, "R Q H"]
    ) -> PyTree[Array]:
        """The residual stream after a layer."""
        return self.transformer.post_attention(weights, x, attended[:, None])

    def settled(self, x: PyTree[Array], rows: int) -> Float[Array, "R 1 D"]:
        """The residual stream as an array of so many rows."""
        return x


class NextTokenTransformer(Transformer):
    """Base of all families that draw tokens. Its `config` has grid (height, width), image_tokens,
    condition_tokens (M), depth, num_heads, head_dim, vocab_size, `check_sampling` and `is_guided`.

    condition_is_one_slot: whether every query gives all visible tokens of the condition the same
      score, so that one slot may stand for them (`condition_slot`).
    new_lines: whether a new line follows every line of image tokens. It is token V, and no part of
      the picture.
    every_token: parameters that are read for every token; of embeddings that is one row.
    """

    condition_is_one_slot: ClassVar[bool] = False
    new_lines: ClassVar[bool] = False
    every_token: ClassVar[tuple[str, ...]] = ("blocks", "head")

    def sequence(self, one_slot: bool = True) -> TokenSequence:
        config = self.config
        slots = 1 if one_slot and self.condition_is_one_slot else config.condition_tokens
        line = config.grid[1] + self.new_lines
        return TokenSequence(config.image_tokens, slots, line, self.new_lines)

    def code_map(self, codec) -> tuple[int, int, int]:
        return (*self.config.grid, codec.code_channels)

    def token_layers(self, implementation: str | None) -> TokenLayers:
        """The layers for one token. implementation: of their kernels."""
        return TokenLayers(self)

    # --- what families share ----------------------------------------------------------------------

    @staticmethod
    def condition_mask(
        visible: Bool[Array, "R M"], image_tokens: int = 0
    ) -> Bool[Array, "R 1 T T"]:
        """The mask of the condition and the image tokens behind it (T together). A token
        sees earlier tokens that are no padding, and itself, even if it is padding."""
        rows, length = visible.shape
        total = length + image_tokens
        keys = jnp.concatenate([visible, jnp.ones((rows, image_tokens), bool)], axis=1)
        before = jnp.tri(total, dtype=bool)
        return ((before & keys[:, None]) | jnp.eye(total, dtype=bool))[:, None]
