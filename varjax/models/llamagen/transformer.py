"""LlamaGen: a Llama that draws image tokens in raster order (Sun et al. 2024, arXiv 2406.06525).

Parameters live in Flax NNX modules whose layers are stacked. The steps that generation calls
(`varjax.models.next_token`) are methods, and teacher forcing runs the same ones.

Letters: R rows, M tokens of the condition, T tokens, E text channels, N heads, H head size, D
width, F hidden width, V vocabulary. Names of the original implementation are in
`ported_weights/tables/llamagen.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.projection import Projection
from varjax.models.llama.decoder import Block, Decoder, linear, ones, table
from varjax.models.llamagen.config import PRESETS, LlamaGenConfig
from varjax.models.transformer import text_shapes
from varjax.nn import stacked

__all__ = ["PRESETS", "Block", "LlamaGen", "LlamaGenConfig"]


class LlamaGen(Decoder):
    """Parameters of the transformer and the steps of generation.

    The condition is int32 labels [B], or what `varjax.text.features.TextFeatures.take` gives.
    Queries and keys of its tokens are zero (their cosines and sines are), so that they look at each
    other evenly, and image tokens give every visible one the score 0.
    """

    condition_is_one_slot = True

    def __init__(self, config: LlamaGenConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, text = config.dim, config.caption_dim
        if config.condition == "labels":
            classes = config.num_classes + config.has_unconditional
            self.class_embedding = table(classes, width, rngs)
        else:
            spread = jax.nn.initializers.normal(text**-0.5)
            self.unconditional_text = table(config.cls_token_num, text, rngs, spread)
            self.text_proj1 = linear(text, width, rngs)
            self.text_proj2 = linear(width, width, rngs)
        self.token_embedding = table(config.vocab_size, width, rngs)
        self.blocks = stacked.stack(lambda r: Block(config, rngs=r), config.n_layer, rngs)
        self.norm = ones(width)
        self.head = linear(width, config.vocab_size, rngs, jax.nn.initializers.zeros)

    # --- once per image ---------------------------------------------------------------------------

    def condition_shapes(self, images: int, text_tokens: int | None = None):
        if self.config.condition == "labels":
            return jax.ShapeDtypeStruct((images,), jnp.int32)
        return text_shapes(self.config, images, text_tokens)

    def encode_condition(self, condition, *, guided: bool) -> dict[str, Array]:
        """The unconditional rows have the null class. With texts they have the negative text, or
        without one the learned unconditional text with as many visible tokens as the image's own
        text."""
        if self.config.condition == "text":
            return self._encode_texts(condition, guided)
        labels = condition
        if guided:
            null = jnp.full_like(labels, self.config.null_label)
            labels = jnp.concatenate([labels, null])
        embedded = self.class_embedding[labels].astype(jnp.float32)
        return {"condition": embedded[:, None], "visible": jnp.ones((len(labels), 1), bool)}

    def _encode_texts(self, condition: dict, guided: bool) -> dict[str, Array]:
        texts, visible = self._left_padded(condition["kv"], condition["length"])
        learned = self.unconditional_text[...].astype(jnp.float32)
        texts = jnp.where(condition["unconditional"][:, None, None], learned, texts)
        if guided and "negative_kv" in condition:
            negative = self._left_padded(condition["negative_kv"], condition["negative_length"])
            texts, visible = map(jnp.concatenate, zip((texts, visible), negative, strict=True))
        elif guided:
            texts = jnp.concatenate([texts, jnp.broadcast_to(learned, texts.shape)])
            visible = jnp.tile(visible, (2, 1))
        return {"condition": self.encode_text(texts), "visible": visible}

    def _left_padded(
        self, text: Float[Array, "B T E"], length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B M E"], Bool[Array, "B M"]]:
        """Moves texts to the end of the condition, with zeros before them; returns also which
        tokens are text."""
        index = (
            jnp.arange(self.config.cls_token_num) - (self.config.cls_token_num - length)[:, None]
        )
        visible = index >= 0
        moved = jnp.take_along_axis(text, index.clip(0, text.shape[1] - 1)[..., None], axis=1)
        return jnp.where(visible[..., None], moved, 0), visible

    def encode_text(self, text: Float[Array, "R M E"]) -> Float[Array, "R M D"]:
        """Embedded features, float32."""
        hidden = jax.nn.gelu(self.text_proj1(text.astype(self.dtype)), approximate=True)
        return self.text_proj2(hidden).astype(jnp.float32)

    def condition_slot(
        self, values: Float[Array, "R N M H"], visible: Bool[Array, "R M"]
    ) -> tuple[Float[Array, "R N 1 H"], Float[Array, "R N 1 H"], Float[Array, " R"]]:
        """All keys of the condition are zero, so n visible tokens weigh together as much as one
        token whose score is log(n) and whose value is the mean of theirs."""
        weights, count = visible.astype(jnp.float32), visible.sum(1).astype(jnp.float32)
        total = jnp.einsum("rnmh,rm->rnh", values.astype(jnp.float32), weights)
        mean = (total / count[:, None, None]).astype(values.dtype)[:, :, None]
        return jnp.zeros_like(mean), mean, jnp.log(count)

    # --- once per token ---------------------------------------------------------------------------

    def embed(self, context: dict, tokens: Int[Array, "B T"]) -> Float[Array, "R T D"]:
        """Embedded tokens, float32."""
        embedded = self.token_embedding[tokens].astype(jnp.float32)
        return jnp.tile(embedded, (len(context["condition"]) // len(tokens), 1, 1))

    def rotation(
        self, context: dict, index: Int[Array, " T"]
    ) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
        """Entries of the table for these tokens; all rows of the batch share them."""
        waves = rotation_table(self.config)
        cos, sin = (jnp.asarray(wave)[index + self.config.cls_token_num] for wave in waves)
        return cos, sin

    # --- one layer --------------------------------------------------------------------------------

    def project(self, block: Block, rotation: tuple, x: Float[Array, "R T D"]) -> Projection:
        h = self.rms_norm(x, block.attention_norm)
        size = self.config.head_dim
        qkv = block.qkv(h).reshape(*h.shape[:2], 3, -1, size)
        return Projection(qkv, rotation=rotation, scale=1 / math.sqrt(size))


@functools.lru_cache(maxsize=32)
def rotation_table(config: LlamaGenConfig) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of all tokens, float32 [M + L, H]; the M tokens of the condition have
    zeros. Pairs of neighbouring numbers share an angle. The first half of the pairs follows the row
    of a token, the second half its column, each with H / 4 frequencies."""
    (height, width), half = config.grid, config.head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = 1 / np.float32(config.rope_base) ** exponents
    row, column = np.divmod(np.arange(height * width), width)
    angles = [np.float32(p)[:, None] * frequencies for p in (row, column)]
    angles = np.repeat(np.concatenate(angles, axis=1), 2, axis=1)
    condition = np.zeros((config.cls_token_num, config.head_dim), np.float32)
    return tuple(np.concatenate([condition, wave(angles)]) for wave in (np.cos, np.sin))
