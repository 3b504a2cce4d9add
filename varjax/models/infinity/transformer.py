"""Infinity: text-to-image next-scale prediction of bits (Han et al. 2024, arXiv 2412.04431).

Parameters live in Flax NNX modules whose layers are stacked; computation is split into the steps
that the generation engine and teacher forcing share:

    read_text(...)             once per image: condition vector, and what cross attention looks at
    prepare(...)               once per image: modulation, keys and values of the text, per layer
    embed(...)                 token inputs of one scale
    project(block, ...)        q, k, v of one layer, normalised and rotated
    finish(block, ...)         cross attention and the rest of the layer
    logits(...)                head, float32: two per bit

The residual stream is float32 whatever the type of the weights, as in the published code.

Letters: R rows, T tokens of a scale (padded), M text tokens (padded), E text channels, L layers, N
heads, H head size, D width, C bits per token. Names of the original implementation are in
`ported_weights/infinity.py`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from varjax.engine.chunks import map_in_chunks
from varjax.models import layers
from varjax.models.infinity.config import LEVELS, PRESETS, InfinityConfig
from varjax.models.infinity.schedules import rope_positions
from varjax.parallel import split
from varjax.parallel.split import Split

__all__ = ["PRESETS", "Block", "Infinity", "InfinityConfig"]

ROPE_BASE = 10000.0
SCORE_BYTES = 2**28  # scores of cross attention that may exist at once


def _normal(std: float):
    return jax.nn.initializers.truncated_normal(std, lower=-2, upper=2)


def _linear(d_in: int, d_out: int, rngs: nnx.Rngs, std: float, use_bias: bool = True) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, use_bias=use_bias, kernel_init=_normal(std), rngs=rngs)


class TextPool(nnx.Module):
    """Attention of one learned query over the text tokens (parameters only)."""

    def __init__(self, config: InfinityConfig, *, rngs: nnx.Rngs):
        width, std = config.embed_dim, (1 / config.embed_dim / 3) ** 0.5
        shape = (config.pool_heads, width // config.pool_heads)
        self.query = nnx.Param(_normal(std)(rngs.params(), shape))
        self.kv = _linear(config.text_channels, 2 * width, rngs, std, use_bias=False)
        self.v_bias = nnx.Param(jnp.zeros((width,)))
        self.proj = _linear(width, width, rngs, std)


class Block(nnx.Module):
    """One transformer layer (parameters only). Stacked over layers by `Infinity`."""

    def __init__(self, config: InfinityConfig, *, rngs: nnx.Rngs):
        width, std = config.embed_dim, (1 / config.embed_dim / 3) ** 0.5
        residual_std = std / math.sqrt(2 * config.depth)
        gates = jnp.array([1e-5, 1e-5, 0.5, 0.5, 0.5, 0.5])[:, None]
        self.modulation_offset = nnx.Param(
            jax.random.normal(rngs.params(), (6, width)) / width**0.5 * gates
        )
        self.qkv = _linear(width, 3 * width, rngs, std, use_bias=False)
        self.q_bias = nnx.Param(jnp.zeros((width,)))
        self.v_bias = nnx.Param(jnp.zeros((width,)))
        self.log_scale = nnx.Param(jnp.full((config.num_heads,), math.log(4.0)))
        self.proj = _linear(width, width, rngs, residual_std)
        self.cross_norm = nnx.LayerNorm(width, epsilon=config.norm_eps, rngs=rngs)
        self.cross_q = _linear(width, width, rngs, std)
        self.cross_kv = _linear(width, 2 * width, rngs, std, use_bias=False)
        self.cross_v_bias = nnx.Param(jnp.zeros((width,)))
        self.cross_proj = _linear(width, width, rngs, residual_std)
        self.fc1 = _linear(width, config.hidden_dim, rngs, std)
        self.fc2 = _linear(config.hidden_dim, width, rngs, residual_std)


class Infinity(nnx.Module):
    """Parameters of the transformer and the per-step functions."""

    def __init__(self, config: InfinityConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, text, std = config.embed_dim, config.text_channels, (1 / config.embed_dim / 3) ** 0.5

        def table(*shape, spread=std):
            return nnx.Param(_normal(spread)(rngs.params(), shape))

        self.text_norm = nnx.Param(jnp.ones((text,)))
        self.unconditional_text = table(config.text_maxlen, text, spread=1.2 / text**0.5)
        self.text_pool = TextPool(config, rngs=rngs)
        self.text_proj1 = _linear(text, width, rngs, std)
        self.text_proj2 = _linear(width, width, rngs, std)
        self.start_embedding = table(1, width)
        self.level_embedding = table(LEVELS, width)
        self.word_embedding = _linear(config.bits, width, rngs, std)
        self.shared_modulation = _linear(width, 6 * width, rngs, std)
        self.blocks = layers.stack_layers(lambda r: Block(config, rngs=r), config.depth, rngs)
        self.head_modulation = _linear(width, 2 * width, rngs, 0.5 * std)
        self.head = _linear(width, 2 * config.bits, rngs, 0.02 * std)

    @staticmethod
    def splits() -> dict[str, Split]:
        """Stacked parameters of the blocks that are divided over heads or the feed-forward's width;
        the others are whole on every device."""
        return {
            "qkv.kernel": Split(2, parts=3),
            "q_bias": Split(1),
            "v_bias": Split(1),
            "log_scale": Split(1),
            "proj.kernel": Split(1),
            "cross_q.kernel": Split(2),
            "cross_q.bias": Split(1),
            "cross_kv.kernel": Split(2, parts=2),
            "cross_v_bias": Split(1),
            "cross_proj.kernel": Split(1),
            "fc1.kernel": Split(2),
            "fc1.bias": Split(1),
            "fc2.kernel": Split(1),
        }

    @property
    def dtype(self):
        """The type of the weights, which is the type that matrix products run in."""
        return self.head.kernel[...].dtype

    # --- once per image ---------------------------------------------------------------------------

    def read_text(
        self, text: Float[Array, "R M E"], visible: Bool[Array, "R M"]
    ) -> tuple[Float[Array, "R D"], Float[Array, "R M D"]]:
        """Condition vector of every row, and what cross attention takes keys and values from."""
        wide = text.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.config.norm_eps)
        normal = (wide * self.text_norm[...]).astype(self.dtype)
        hidden = jax.nn.gelu(self.text_proj1(normal), approximate=True)
        return self._pool(normal, visible), self.text_proj2(hidden)

    def _pool(self, normal: Float[Array, "R M E"], visible: Bool[Array, "R M"]):
        pool, heads = self.text_pool, self.config.pool_heads
        k, v = jnp.split(pool.kv(normal), 2, axis=-1)
        k, v = (layers.split_heads(a, a.shape[-1] // heads) for a in (k, v + pool.v_bias[...]))
        q = jnp.broadcast_to(pool.query[...][:, None], (k.shape[0], heads, 1, k.shape[-1]))
        return pool.proj(layers.merge_heads(_attend_text(q, k, v, visible)))[:, 0]

    def prepare(
        self, text: Float[Array, "R M E"], length: Int[Array, " R"]
    ) -> dict[str, dict[str, Array] | Array]:
        """Condition of every row from raw text features: `start` [R, 1, D], `head` [R, 2, D],
        `visible` [R, M] and `layers`: modulation [L, R, 6, D], keys and values of the text
        [L, R, N, M, H], and the number of the layer [L]."""
        config = self.config
        visible = jnp.arange(text.shape[1]) < length[:, None]
        condition, source = self.read_text(text, visible)
        active = jax.nn.silu(condition)
        shared = self.shared_modulation(active).reshape(-1, 6, config.embed_dim)
        kernels, bias = self.blocks.cross_kv.kernel[...], self.blocks.cross_v_bias[...]

        def keys_and_values(layer):
            k, v = jnp.split(source @ layer[0], 2, axis=-1)
            return tuple(layers.split_heads(a, config.head_dim) for a in (k, v + layer[1]))

        keys, values = jax.lax.map(keys_and_values, (kernels, bias))
        return {
            "start": condition[:, None] + self.start_embedding[...],
            "head": self.head_modulation(active).reshape(-1, 2, config.embed_dim),
            "visible": visible,
            "layers": {
                "modulation": self.blocks.modulation_offset[:, None] + shared[None],
                "text_keys": keys,
                "text_values": values,
                "number": jnp.arange(config.depth),
            },
        }

    # --- once per scale ---------------------------------------------------------------------------

    def embed(
        self,
        start: Float[Array, "R 1 D"],
        codes: Float[Array, "B T C"],
        scale: Int[Array, ""],
    ) -> Float[Array, "R T D"]:
        """Inputs of one scale, float32: the resized codes, or the start embedding at scale 0, plus
        level.

        `codes` holds one row per image; conditional and unconditional rows share it.
        """
        words = self.word_embedding(codes.astype(self.dtype))
        words = jnp.tile(words, (start.shape[0] // words.shape[0], 1, 1))
        x = jnp.where(scale == 0, start, words) + self.level_embedding[scale]
        return x.astype(jnp.float32)

    def rotation(self, token_index: Int[Array, " T"]) -> tuple[Float[Array, "T H"], ...]:
        """Cosines and sines by which keys and queries of these tokens are rotated, float32; pairs
        of neighbouring numbers share an angle. The first half follows the row, the second the
        column."""
        config = self.config
        positions = rope_positions(config.schedule, config.rope_map)
        quarter = config.head_dim // 4
        frequencies = (ROPE_BASE ** (-np.arange(quarter) / quarter)).astype(np.float32)
        angles = jnp.asarray(positions)[token_index].astype(jnp.float32)[:, :, None] * frequencies
        angles = jnp.repeat(angles.reshape(len(token_index), -1), 2, axis=-1)
        return jnp.cos(angles), jnp.sin(angles)

    # --- one layer --------------------------------------------------------------------------------

    def project(
        self, block: Block, modulation: Float[Array, "R 6 D"], rotation, x: Float[Array, "R T D"]
    ):
        """Queries, keys and values [R, N, T, H] of one layer: normalised (eps 1e-12), queries times
        the learned multiplier, both rotated, in float32.

        A rotation keeps lengths, so it comes first: normalised copies in float32, which a rotation
        would read twice, are never in memory.
        """
        h = self._attention_input(modulation, x)
        q, k, v = layers.fused_qkv(block, h, self.config.head_dim)
        multiplier = layers.attention_multiplier(block.log_scale[...])
        q_rotated, k_rotated = (rotate(a, *rotation) for a in (q, k))
        q = q_rotated * (multiplier / layers.length(q))
        return q.astype(v.dtype), (k_rotated / layers.length(k)).astype(v.dtype), v

    def raw_queries(
        self, block: Block, modulation: Float[Array, "R 6 D"], x: Float[Array, "R T D"]
    ) -> Float[Array, "R N T H"]:
        """See `layers.plain_queries`."""
        return layers.plain_queries(
            block, self._attention_input(modulation, x), self.config.head_dim
        )

    def _attention_input(self, modulation, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        return self._modulated(x, modulation[:, 2], modulation[:, 4])

    def _modulated(self, x, scale, shift) -> Float[Array, "R T D"]:
        """Normalised and modulated in float32, then in the type of the weights."""
        normal = layers.layer_norm(x.astype(jnp.float32), self.config.norm_eps)
        return layers.modulate(normal, scale, shift).astype(self.dtype)

    def finish(
        self,
        block: Block,
        layer_context: dict[str, Array],
        visible: Bool[Array, "R M"],
        x: Float[Array, "R T D"],
        attended: Float[Array, "R N T H"],
    ) -> Float[Array, "R T D"]:
        """Output projection, cross attention, feed-forward, gates and residuals of one layer."""
        modulation = layer_context["modulation"]
        x = x + split.contract(block.proj, layers.merge_heads(attended)) * modulation[:, None, 0]
        x = x + self.cross_attention(block, layer_context, visible, x)
        h = self._modulated(x, modulation[:, 3], modulation[:, 5])
        wide = jax.nn.gelu(block.fc1(h), approximate=True)
        return x + split.contract(block.fc2, wide) * modulation[:, None, 1]

    def cross_attention(self, block: Block, layer_context, visible, x: Float[Array, "R T D"]):
        """What the tokens take from the text, [R, T, D]."""
        h = layers.layer_norm(x.astype(jnp.float32), self.config.norm_eps)
        h = h * block.cross_norm.scale[...] + block.cross_norm.bias[...]
        h = h.astype(self.dtype)
        q = layers.split_heads(block.cross_q(h), self.config.head_dim)
        k, v = layer_context["text_keys"], layer_context["text_values"]
        out = _attend_text(q, k, v, visible)
        return split.contract(block.cross_proj, layers.merge_heads(out))

    def logits(
        self, modulation: Float[Array, "R 2 D"], x: Float[Array, "R T D"]
    ) -> Float[Array, "R T 2*C"]:
        """Float32 logits, before guidance: those of bit c at 2 c (the bit is 0) and 2 c + 1."""
        return layers.modulated_head(self.head, modulation, x, self.config.norm_eps)

    # --- all scales at once (training) ------------------------------------------------------------

    def __call__(
        self,
        text: Float[Array, "B M E"],
        length: Int[Array, " B"],
        codes: Float[Array, "B K C"],
    ) -> Float[Array, "B L 2*C"]:
        """Teacher-forced logits under the block-causal mask. `codes` are the inputs of scales 1..
        (`BSQVAE.teacher_inputs`)."""
        schedule = self.config.schedule
        context = self.prepare(text, length)
        words = self.word_embedding(codes.astype(self.dtype))
        scale = schedule.scale_of_token
        x = jnp.concatenate([context["start"], words], axis=1) + self.level_embedding[scale]
        x = x.astype(jnp.float32)
        mask = jnp.asarray(scale[:, None] >= scale[None, :])
        rotation = self.rotation(jnp.arange(schedule.total_tokens))

        def layer(x, inputs):
            block, layer_context = inputs
            q, k, v = self.project(block, layer_context["modulation"], rotation, x)
            attended = layers.dense_attention(q, k, v, mask)
            return self.finish(block, layer_context, context["visible"], x, attended), None

        x, _ = jax.lax.scan(layer, x, (self.blocks, context["layers"]))
        return self.logits(context["head"], x)


def rotate(
    x: Float[Array, "R N T H"], cos: Float[Array, "T H"], sin: Float[Array, "T H"]
) -> Float[Array, "R N T H"]:
    """Rotary embedding, float32: numbers 2 j and 2 j + 1 are turned by the angle of their pair."""
    turned = jax.lax.platform_dependent(x, tpu=quarter_turn_by_product, default=quarter_turn)
    return x.astype(jnp.float32) * cos + turned.astype(jnp.float32) * sin


def quarter_turn(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Every pair (a, b) of neighbours as (-b, a)."""
    even = jnp.arange(x.shape[-1]) % 2 == 0
    return jnp.where(even, -jnp.roll(x, -1, axis=-1), jnp.roll(x, 1, axis=-1))


def quarter_turn_by_product(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """The same as a product with a matrix of zeros and ones, which is exact. TPUs keep what a roll
    cuts off in memory, each number in a row of its own."""
    size = x.shape[-1]
    matrix = np.zeros((size, size), np.float32)
    matrix[np.arange(1, size, 2), np.arange(0, size, 2)] = -1
    matrix[np.arange(0, size, 2), np.arange(1, size, 2)] = 1
    return jnp.einsum(
        "...h,hk->...k", x, jnp.asarray(matrix, x.dtype), precision=jax.lax.Precision.HIGHEST
    )


def _attend_text(
    q: Float[Array, "R N T H"],
    k: Float[Array, "R N M H"],
    v: Float[Array, "R N M H"],
    visible: Bool[Array, "R M"],
) -> Float[Array, "R N T H"]:
    """Attention over text of every row's own length, a few rows at a time where scores are large;
    softmax in float32."""
    per_row = 2 * 4 * q.shape[1] * q.shape[2] * k.shape[2]

    def some(index) -> Any:
        scores = jnp.einsum(
            "rnth,rnmh->rntm", q[index], k[index], preferred_element_type=jnp.float32
        )
        scores = scores * q.shape[-1] ** -0.5
        scores = jnp.where(visible[index][:, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("rntm,rnmh->rnth", weights, v[index])

    return map_in_chunks(some, q.shape[0], SCORE_BYTES // per_row)
