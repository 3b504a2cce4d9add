"""Janus-Pro: a language model that draws pictures of image tokens (Chen et al. 2025, arXiv
2501.17811). Only the part that draws is here: no vision tower, and no head for text.

Image tokens have an embedding of their own, which an aligner widens, and a head of their own. Names
of the original implementation are in `ported_weights/tables/janus.py`.

Letters: B images, R rows, M slots of the condition, T tokens, D width, V codes.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.models.janus.config import PRESETS, JanusConfig
from varjax.models.llama.decoder import Block, Llama, linear, ones, table
from varjax.nn import stacked

__all__ = ["PRESETS", "Janus", "JanusConfig"]


class Janus(Llama):
    """Parameters of the transformer and the steps of generation."""

    every_token = ("blocks", "head", "head_hidden", "aligner1", "aligner2")

    def __init__(self, config: JanusConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, hidden = config.hidden_size, config.head_hidden
        self.token_embedding = table(config.text_vocab_size, width, rngs)
        self.image_embedding = table(config.vocab_size, config.code_dim, rngs)
        self.aligner1 = linear(config.code_dim, width, rngs, bias=True)
        self.aligner2 = linear(width, width, rngs, bias=True)
        self.blocks = stacked.stack(lambda r: Block(config, rngs=r), config.depth, rngs)
        self.norm = ones(width)
        self.head_hidden = linear(width, hidden, rngs, bias=True)
        self.head = linear(hidden, config.vocab_size, rngs, bias=True)

    def encode_condition(self, condition, *, guided: bool) -> dict[str, Array]:
        """The unconditional rows have the prompt's first and last id, and `pad_id` between them.
        These pads are seen like any other token, as published: so the logits of such a row depend
        on the length of the prompt."""
        ids, length = condition["ids"], condition["length"]
        if guided:
            slot, slots = jnp.arange(ids.shape[1]), ids.shape[1]
            inner = (slot > slots - length[:, None]) & (slot < slots - 1)
            nothing = jnp.where(inner, self.config.pad_id, ids)
            ids, length = jnp.concatenate([ids, nothing]), jnp.tile(length, 2)
        return self.prompt_context(ids, length)

    def embed(self, context: dict, tokens: Int[Array, "B T"]) -> Float[Array, "R T D"]:
        """Embedded tokens, float32."""
        codes = self.image_embedding[tokens].astype(self.dtype)
        wide = jax.nn.gelu(self.aligner1(codes), approximate=False)
        embedded = self.aligner2(wide).astype(jnp.float32)
        return jnp.tile(embedded, (len(context["condition"]) // len(tokens), 1, 1))

    def plain_logits(self, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        h = self.rms_norm(x, self.norm)
        h = jax.nn.gelu(self.head_hidden(h), approximate=False)
        logits = self.head.product(h, jnp.float32)
        return logits + self.head.bias[...].astype(jnp.float32)
