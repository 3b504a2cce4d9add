"""Lumina-mGPT: Chameleon's transformer, tuned to draw pictures of many sizes (Liu et al. 2024,
arXiv 2408.02657; Chameleon: arXiv 2405.09818).

An image is written line by line, with a new line behind every line; the prompt ends with its height
and width. Tokens are numbered by the codes of the image tokenizer here; V is the new line.

Letters: B images, R rows, M slots of the condition, T tokens, Q query heads, H head size, D width,
V codes. Names of the original implementation are in `ported_weights/tables/lumina.py`.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.models.llama.decoder import Block, Llama, linear, ones, table
from varjax.models.lumina.config import PRESETS, LuminaConfig
from varjax.nn import stacked

__all__ = ["PRESETS", "Lumina", "LuminaConfig"]


class Lumina(Llama):
    """Parameters of the transformer and the steps of generation. The head gives logits of image
    tokens only, in the order of codes: others are never allowed within an image."""

    new_lines = True

    def __init__(self, config: LuminaConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.hidden_size
        self.token_embedding = table(config.text_vocab_size, width, rngs)
        self.blocks = stacked.stack(lambda r: Block(config, rngs=r), config.depth, rngs)
        self.norm = ones(width)
        self.head = linear(width, config.vocab_size, rngs)

    def encode_condition(self, condition, *, guided: bool) -> dict[str, Array]:
        """The unconditional rows know the size of the image only: image start, height and width.
        Their positions begin there."""
        ids, length = condition["ids"], condition["length"]
        if guided:
            opening = jnp.full_like(length, len(self.config.opening))
            ids, length = jnp.tile(ids, (2, 1)), jnp.concatenate([length, opening])
        return self.prompt_context(ids, length)

    def embed(self, context: dict, tokens: Int[Array, "B T"]) -> Float[Array, "R T D"]:
        """Embedded tokens, float32."""
        ids = jnp.asarray(np.array(self.config.token_ids, np.int32))
        embedded = self.token_embedding[ids[tokens]].astype(jnp.float32)
        return jnp.tile(embedded, (len(context["condition"]) // len(tokens), 1, 1))
