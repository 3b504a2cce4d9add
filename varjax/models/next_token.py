"""The interface of transformers that draw images token by token, in raster order.

The engine knows stages, layers and the cache; everything else is a step that the transformer
brings, in the order in which it is called:

    encode_condition    once per image: embedded condition, which of its tokens are visible
    rotation            once per token: what turns queries and keys
    project             a layer's queries, keys and values, finished: rotated, queries scaled
    post_attention      the rest of the layer, given the attention output
    logits              the head, with guidance
    sample              tokens
    embed               the tokens drawn, as inputs of the next step

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

import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from pallas_kernels.projection import Projection
from varjax import sampling as sampling_lib
from varjax.models.transformer import Transformer
from varjax.nn import layers, stacked
from varjax.nn.published import Configuration
from varjax.sampling import Sampling, Scores
from varjax.sequence import TokenSequence


def as_it_is(branch: Array, number: int) -> Array:
    """Returns what a branch adds, without dropout."""
    return branch


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

    def code_map(self, codec: Configuration) -> tuple[int, int, int]:
        return (*self.config.grid, codec.code_channels)

    # --- traced steps -----------------------------------------------------------------------------

    def encode_condition(self, condition: PyTree, *, guided: bool) -> dict[str, Array]:
        """Everything that depends on the condition only, for all rows: `condition` float32
        [R, M, D], its embedded tokens; `visible` bool [R, M], the tokens that are no padding; and
        what else `rotation` needs."""
        raise NotImplementedError

    def embed(self, context: dict, tokens: Int[Array, "B T"]) -> Float[Array, "R T D"]:
        """Embedded image tokens; both rows of an image have the same tokens."""
        raise NotImplementedError

    def rotation(
        self, context: dict, index: Int[Array, " T"]
    ) -> tuple[Float[Array, "*rows T H"], Float[Array, "*rows T H"]]:
        """Cosines and sines that rotate these tokens, float32, in the layout of `Projection`. They
        have a leading axis over rows only where rows differ."""
        raise NotImplementedError

    def project(self, block, rotation: tuple, x: Float[Array, "R T D"]) -> Projection:
        """Finished queries, keys and values of one layer: queries carry the attention scale, they
        and keys are rotated. What answers as a `Projection` will do; Q query heads may share N
        heads of keys."""
        raise NotImplementedError

    def post_attention(
        self,
        block,
        x: Float[Array, "R T D"],
        attended: Float[Array, "R T Q H"],
        drop: Callable = as_it_is,
    ) -> Float[Array, "R T D"]:
        """Output projection, feed-forward and residuals of one layer. drop(branch, number): applied
        to what branch `number` adds; training passes dropout."""
        raise NotImplementedError

    def token_products(self, implementation: str | None):
        """The layers for one token as a few products that do more
        (`varjax.models.llama.token_products.TokenProducts`), or None: `project` and
        `post_attention` then are the layer."""
        return None

    def plain_logits(self, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        """Float32 logits of every row, before temperature and guidance."""
        raise NotImplementedError

    def logits(self, x: Float[Array, "R 1 D"], index: Int[Array, ""], sampling: Sampling) -> Scores:
        """Logits of image token `index`, from the output of the layers for the token before it,
        with temperature and guidance to be applied."""
        raise NotImplementedError

    def condition_slot(
        self, values: Float[Array, "R N M H"], visible: Bool[Array, "R M"]
    ) -> tuple[Float[Array, "R N 1 H"], Float[Array, "R N 1 H"], Float[Array, " R"]]:
        """Where `condition_is_one_slot`: the key and the value of the one slot that stands for the
        condition's M tokens in a layer, and what is added to its score, float32."""
        raise NotImplementedError

    # --- what families share ----------------------------------------------------------------------

    def sample(
        self, scores: Scores, keys: Array, sampling: Sampling, implementation: str | None = None
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T V"] | None]:
        """Draws tokens; the results are those of `varjax.sampling.sample`."""
        return sampling_lib.sample(scores, keys, sampling, implementation)

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

    def teacher_forced(
        self,
        context: dict,
        tokens: Int[Array, "B T"],
        dropout: float = 0.0,
        key: Array | None = None,
    ) -> Float[Array, "R image_tokens V"]:
        """Plain logits of image tokens 0 to T, all at once (training, parity), given tokens 0 to
        T - 1. dropout: the share of inputs, and of what branches add, that is set to zero."""
        condition, visible = context["condition"], context["visible"]
        count, length = tokens.shape[1], visible.shape[1]
        mask = self.condition_mask(visible, count)
        rotation = self.rotation(context, jnp.arange(-length, count))

        def layer(x, inputs):
            block, key = inputs
            projection = self.project(block, rotation, x)
            q, k, v = projection.queries(), projection.keys(), projection.values()
            attended = layers.dense_attention(q, k, v, mask)
            drop = functools.partial(layers.dropout, rate=dropout, key=key)
            return self.post_attention(block, x, attended, drop)

        x = jnp.concatenate([condition, self.embed(context, tokens)], axis=1)
        keys = jax.random.split(jax.random.key(0) if key is None else key, 1 + self.config.depth)
        x = layers.dropout(x, 0, rate=dropout, key=keys[0])
        x = stacked.scan(self.trained(layer), x, (self.blocks, keys[1:]))
        return self.plain_logits(x[:, length - 1 :])
