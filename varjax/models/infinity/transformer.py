"""Infinity: text-to-image next-scale prediction of bits (Han et al. 2024, arXiv 2412.04431).

The residual stream is float32 whatever the type of the weights, as in the published code.

Letters: R rows, T tokens of a scale (padded), M text tokens (padded), E text channels, L layers, N
heads, H head size, D width, C bits per token. Names of the original implementation are in
`ported_weights/tables/transformers.py`.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt8

from pallas_kernels.cross_attention import TextKeys, attend_text, attend_visible
from pallas_kernels.projection import Projection
from varjax.core import layers, stacked
from varjax.core import sampling as sampling_lib
from varjax.core.layers import HEADS, Linear, ResidualStream, Split
from varjax.core.next_scale import NextScaleTransformer
from varjax.core.sampling import Sampling, Scores
from varjax.core.step_inputs import Resampling, StepInputs
from varjax.fast.stream import stream_of
from varjax.models.infinity.config import LEVELS, PRESETS, InfinityConfig, rope_positions
from varjax.text.features import text_shapes

__all__ = ["PRESETS", "InfinityBlock", "Infinity", "InfinityConfig"]

ROPE_BASE = 10000.0
normal = jax.nn.initializers.truncated_normal  # at two standard deviations


class TextPool(nnx.Module):
    """Attention of one learned query over the text tokens (parameters only)."""

    def __init__(self, config: InfinityConfig, *, rngs: nnx.Rngs):
        width, std = config.embed_dim, (1 / config.embed_dim / 3) ** 0.5
        shape = (config.pool_heads, width // config.pool_heads)
        linear = partial(Linear, kernel_init=normal(std), rngs=rngs)
        self.query = nnx.Param(normal(std)(rngs.params(), shape))
        self.kv = linear(config.text_channels, 2 * width, use_bias=False)
        self.v_bias = nnx.Param(jnp.zeros((width,)))
        self.proj = linear(width, width)


class InfinityBlock(nnx.Module):
    """One transformer layer (parameters only). Stacked over layers by `Infinity`."""

    def __init__(self, config: InfinityConfig, *, rngs: nnx.Rngs):
        width, std = config.embed_dim, (1 / config.embed_dim / 3) ** 0.5
        linear = partial(Linear, kernel_init=normal(std), rngs=rngs)
        last = partial(Linear, kernel_init=normal(std / math.sqrt(2 * config.depth)), rngs=rngs)
        gates = jnp.array([1e-5, 1e-5, 0.5, 0.5, 0.5, 0.5])[:, None]
        self.modulation_offset = nnx.Param(
            jax.random.normal(rngs.params(), (6, width)) / width**0.5 * gates
        )
        self.qkv = linear(width, 3 * width, use_bias=False)
        self.q_bias = nnx.Param(jnp.zeros((width,)))
        self.v_bias = nnx.Param(jnp.zeros((width,)))
        self.log_scale = nnx.Param(jnp.full((config.num_heads,), math.log(4.0)))
        self.proj = last(width, width)
        self.cross_norm = nnx.LayerNorm(width, epsilon=config.norm_eps, rngs=rngs)
        self.cross_q = linear(width, width)
        self.cross_kv = linear(width, 2 * width, use_bias=False)
        self.cross_v_bias = nnx.Param(jnp.zeros((width,)))
        self.cross_proj = last(width, width)
        self.fc1 = linear(width, config.hidden_dim)
        self.fc2 = last(config.hidden_dim, width)


class Infinity(NextScaleTransformer):
    """Parameters of the transformer and the steps of generation.

    Text-conditional: the condition is what `varjax.text.features.TextFeatures.take` gives: kv
    [B, M, E], length [B], unconditional [B], and for negative prompts negative_kv and
    negative_length. A token is a row of bits, uint8 [C].
    """

    token_name = "bits"
    once = ("cross_kv",)

    def __init__(self, config: InfinityConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, text, std = config.embed_dim, config.text_channels, (1 / config.embed_dim / 3) ** 0.5

        linear = partial(Linear, kernel_init=normal(std), rngs=rngs)

        def table(*shape, spread=std):
            return nnx.Param(normal(spread)(rngs.params(), shape))

        self.text_norm = nnx.Param(jnp.ones((text,)))
        self.unconditional_text = table(config.text_maxlen, text, spread=1.2 / text**0.5)
        self.text_pool = TextPool(config, rngs=rngs)
        self.text_proj1 = linear(text, width)
        self.text_proj2 = linear(width, width)
        self.start_embedding = table(1, width)
        self.level_embedding = table(LEVELS, width)
        self.word_embedding = linear(config.bits, width)
        self.shared_modulation = linear(width, 6 * width)
        self.blocks = stacked.stack(lambda r: InfinityBlock(config, rngs=r), config.depth, rngs)
        self.head_modulation = linear(width, 2 * width, kernel_init=normal(0.5 * std))
        self.head = linear(width, 2 * config.bits, kernel_init=normal(0.02 * std))

    @staticmethod
    def splits() -> dict[str, Split]:
        return NextScaleTransformer.splits() | {
            "cross_q.kernel": Split(2, HEADS),
            "cross_q.bias": Split(1, HEADS),
            "cross_kv.kernel": Split(2, HEADS, parts=(1, 1)),
            "cross_v_bias": Split(1, HEADS),
            "cross_proj.kernel": Split(1, HEADS),
        }

    # --- once per image ---------------------------------------------------------------------------

    def encode_text(
        self, text: Float[Array, "R M E"], visible: Bool[Array, "R M"]
    ) -> tuple[Float[Array, "R D"], Float[Array, "R M D"]]:
        """Condition vector of every row, and what cross attention takes keys and values from."""
        text = layers.rms_norm(text, self.text_norm[...], self.config.norm_eps, self.dtype)
        hidden = jax.nn.gelu(self.text_proj1(text), approximate=True)
        pool, heads = self.text_pool, self.config.pool_heads
        k, v = jnp.split(pool.kv(text), 2, axis=-1)
        k, v = (layers.split_heads(a, a.shape[-1] // heads) for a in (k, v + pool.v_bias[...]))
        q = jnp.broadcast_to(pool.query[...][:, None], (k.shape[0], heads, 1, k.shape[-1]))
        pooled = layers.merge_heads(attend_visible(q, k, v, visible))
        return pool.proj(pooled)[:, 0], self.text_proj2(hidden)

    @property
    def resampling(self) -> Resampling:
        return "bilinear", "bilinear", self.config.patch

    def condition_shapes(self, images: int, text_tokens: int | None = None) -> dict:
        return text_shapes(self.config, images, text_tokens)

    def encode_condition(
        self, condition: dict[str, Array], *, guided: bool, implementation: str | None = None
    ) -> dict:
        """An unconditional row sees the negative prompt; without one it sees the unconditional
        text, cut to the length of the prompt. The conditional row of an image whose prompt is empty
        sees the unconditional text, too."""
        text, length = condition["kv"], condition["length"]
        empty = self.unconditional_text[: text.shape[1]]
        empty = jnp.broadcast_to(empty, text.shape).astype(text.dtype)
        text = jnp.where(condition["unconditional"][:, None, None], empty, text)
        if not guided:
            return self.encode_rows(text, length, implementation)
        other, other_length = empty, length
        if "negative_kv" in condition:
            other, other_length = condition["negative_kv"], condition["negative_length"]
        longest = max(text.shape[1], other.shape[1])
        text, other = (
            jnp.pad(a, ((0, 0), (0, longest - a.shape[1]), (0, 0))) for a in (text, other)
        )
        lengths = jnp.concatenate([length, other_length])
        return self.encode_rows(jnp.concatenate([text, other]), lengths, implementation)

    def encode_rows(
        self,
        text: Float[Array, "R M E"],
        length: Int[Array, " R"],
        implementation: str | None = "reference",
    ) -> dict[str, PyTree]:
        """Condition of every row from raw text features: `start` [R, 1, D], `head` [R, 2, D],
        `text` (`cross_attention.TextKeys`) and `layers`: modulation [L, R, 6, D], the same of cross
        attention `cross` [L, 1, 3, D] (scale, shift, gate), and the number of the layer [L].
        implementation: of the attention over the text."""
        config = self.config
        visible = jnp.arange(text.shape[1]) < length[:, None]
        condition, source = self.encode_text(text, visible)
        active = jax.nn.silu(condition)
        shared = self.shared_modulation(active).reshape(-1, 6, config.embed_dim)
        found = self.blocks.cross_kv.of_all_layers(source)
        k, v = jnp.split(found.reshape(*found.shape[:3], -1, config.head_dim), 2, axis=3)
        bias = self.blocks.cross_v_bias[...].reshape(config.depth, 1, 1, *v.shape[3:])
        keys, values = k.swapaxes(2, 3), (v + bias).swapaxes(2, 3)  # each [L, R, N, M, H]
        norm = self.blocks.cross_norm
        weight, shift = (p[...].astype(jnp.float32) for p in (norm.scale, norm.bias))
        return {
            "start": condition[:, None] + self.start_embedding[...],
            "head": self.head_modulation(active).reshape(-1, 2, config.embed_dim),
            "text": TextKeys.of(keys, values, length, implementation),
            "layers": {
                "modulation": self.blocks.modulation_offset[:, None] + shared[None],
                "cross": jnp.stack([weight - 1, shift, jnp.ones_like(shift)], 1)[:, None],
                "number": jnp.arange(config.depth),
            },
        }

    # --- once per scale ---------------------------------------------------------------------------

    def scale_context(self, context: dict, step: StepInputs, sampling: Sampling) -> dict:
        """The rotation and the text. If rows are mixed inside the network, also `mix` [L]: the
        guidance strength after every layer, where 0 leaves both rows as they are."""
        config = self.config
        shared = {"rotation": self.rotation(step.token_index), "text": context["text"]}
        inside = [config.depth + place for place in sampling.cfg_insertion_layer if place < 0]
        if inside and config.is_guided(sampling):
            mixed = jnp.zeros(config.depth, bool).at[jnp.asarray(inside)].set(True)
            # t in (1 + t) * cond - t * uncond
            strength = sampling.at("cfg", step.scale, config.schedule.num_scales) - 1
            # teacher forcing has a strength for each token: [T, 1]
            shared["mix"] = jnp.where(mixed.reshape(-1, *(1,) * strength.ndim), strength, 0)
        return shared

    def embed(
        self, context: dict, codes: Float[Array, "B T C"], step: StepInputs
    ) -> Float[Array, "R T D"]:
        """The resized codes (at scale 0 the start embedding) plus level, float32."""
        start = context["start"]
        words = self.words(len(start), codes)
        x = jnp.where(step.scale == 0, start, words) + self.level_embedding[step.scale]
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

    def stream(
        self, x: Float[Array, "R T D"], implementation: str | None = "reference"
    ) -> ResidualStream:
        """Normalised and modulated in float32, then in the type of the weights."""
        return stream_of(self, x.astype(jnp.float32), implementation, self.dtype)

    def project(
        self, block: InfinityBlock, layer_context: dict, shared: dict, x: ResidualStream
    ) -> tuple[Projection, ResidualStream]:
        """Still to be done, in float32: queries and keys are normalised (eps 1e-12) and rotated,
        queries are multiplied by the learned multiplier."""
        h, x = x.normalized(layer_context["modulation"], 2, 4, self.config.norm_eps)
        projection = replace(
            x.qkv(block, h, self.config.head_dim),
            rotation=shared["rotation"],
            multiplier=layers.attention_multiplier(block.log_scale[...]),
        )
        return projection, x

    def post_attention(
        self,
        block: InfinityBlock,
        layer_context: dict,
        shared: dict,
        x: ResidualStream,
        attended: Float[Array, "R T N H"],
    ) -> ResidualStream:
        """Output projection, cross attention, feed-forward, gates and residuals of one layer; then
        guidance, where it acts after this layer."""
        modulation, cross, layer = (layer_context[n] for n in ("modulation", "cross", "number"))
        axis, eps, flat = self.model_axis, self.config.norm_eps, (*attended.shape[:2], -1)
        gelu = partial(jax.nn.gelu, approximate=True)
        x = x.added(x.contracted(block.proj, attended.reshape(flat), axis), modulation, 0)
        h, x = x.normalized(cross, 0, 1, eps)
        q = block.cross_q(h).reshape(*flat, self.config.head_dim)
        text = attend_text(q, shared["text"], layer).reshape(flat)
        x = x.added(x.contracted(block.cross_proj, text, axis), cross, 2)
        h, x = x.normalized(modulation, 3, 5, eps)
        x = x.added(x.feed_forward(block.fc1, block.fc2, h, axis, gelu), modulation, 1)
        if "mix" not in shared:
            return x
        strength, value = shared["mix"][layer], x.settled()
        mixed = jnp.tile(sampling_lib.guided(value, strength=strength), (2, 1, 1))
        return ResidualStream(jnp.where(strength == 0, value, mixed), x.dtype)

    # --- tokens -----------------------------------------------------------------------------------

    def logits(
        self,
        head: Float[Array, "R 2 D"],
        x: Float[Array, "R T D"],
        step: StepInputs,
        sampling: Sampling,
    ) -> Scores:
        """Logits [B, T, C, 2] with temperature and guidance: [..., c, 0] says that bit c is 0,
        [..., c, 1] that it is 1. Where guidance acts inside the network, only conditional rows
        reach the head."""
        guided, on_logits = self.config.is_guided(sampling), 0 in sampling.cfg_insertion_layer
        if guided and not on_logits:
            head, x = (a[: len(a) // 2] for a in (head, x))
        with jax.named_scope("head"):
            logits = self.plain_logits(head, x)
        scales = self.config.schedule.num_scales
        logits = logits / sampling.at("tau", step.scale, scales)
        if guided and on_logits:
            strength = sampling.at("cfg", step.scale, scales) - 1
            logits = sampling_lib.guided(logits, strength=strength)
        return Scores(logits.reshape(*logits.shape[:2], -1, 2))

    def sample(
        self, scores: Scores, keys: Array, sampling: Sampling, implementation: str | None = None
    ) -> tuple[UInt8[Array, "B T C"], Float[Array, "B T*C 2"] | None]:
        """Every bit is a draw of its own from two logits, for which no kernel is needed."""
        images, tokens, num_bits = scores.plain.shape[:3]
        flat = Scores(scores.plain.reshape(images, tokens * num_bits, 2))
        drawn, filtered = sampling_lib.sample(flat, keys, sampling, "reference")
        return drawn.reshape(images, tokens, -1).astype(jnp.uint8), filtered
