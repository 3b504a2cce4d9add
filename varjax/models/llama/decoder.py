"""Base of the decoders of the Llama family: their layers, and guidance on the logits.

Letters: R rows, M slots of the condition, T tokens, N heads of keys and values, G query heads for
each of them, H head size, D width, F hidden width, V codes of image tokens, S sets of norm weights.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.core import layers
from varjax.core.layers import HEADS, HIDDEN, Split
from varjax.core.next_token import NextTokenTransformer, TokenLayers, as_it_is
from varjax.core.sampling import Sampling, Scores
from varjax.models.llama.config import DecoderConfig
from varjax.models.llama.token_products import where_they_fit

HEAD_NORM_EPS = 1e-5  # fixed in published code, whatever `rms_norm_eps` says
normal = jax.nn.initializers.normal(0.02)


def linear(d_in: int, d_out: int, rngs: nnx.Rngs, init=normal, *, bias=False) -> layers.Linear:
    return layers.Linear(d_in, d_out, use_bias=bias, kernel_init=init, rngs=rngs)


def table(rows: int, columns: int, rngs: nnx.Rngs, init=normal) -> nnx.Param:
    return nnx.Param(init(rngs.params(), (rows, columns)))


class HeadNorm(nnx.Module):
    """Layer normalisation of heads, with S sets of weights for equally many neighbouring heads."""

    def __init__(self, shards: int, size: int):
        self.scale = nnx.Param(jnp.ones((shards, size)))
        self.bias = nnx.Param(jnp.zeros((shards, size)))

    def __call__(
        self, x: Float[Array, "R T N H"], heads: int, axis: str | None
    ) -> Float[Array, "R T N H"]:
        """Normalised heads, float32. heads: of all devices along `axis`, N those of this one."""
        *_, own, size = x.shape
        each = heads // self.scale[...].shape[0]
        # Two dimensions: XLA tries every tiling of a norm for GPUs, and with four or five of them
        # compiling a layer takes three times as long, one with its neighbours minutes.
        flat = x.astype(jnp.float32).reshape(-1, size)

        def of_device(parameter):
            rows = jnp.repeat(parameter[...].astype(jnp.float32), each, axis=0)
            if axis is None:
                return rows
            # the sets are whole on all devices: there may be fewer of them than devices
            return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(axis) * own, own)

        scale, bias = of_device(self.scale), of_device(self.bias)
        return layers.layer_norm(flat, HEAD_NORM_EPS).reshape(x.shape) * scale + bias


class LlamaBlock(nnx.Module):
    """One layer (parameters only); models stack them. `qkv` gives all queries, then keys, then
    values; `gate_up` the gates, then what they let through. `q_norm` and `k_norm`: queries and keys
    are normalised before they are rotated."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        width, hidden, size = config.embed_dim, config.hidden_dim, config.head_dim
        heads, groups = config.num_heads, config.queries_per_head
        self.attention_norm = nnx.Param(jnp.ones(width))
        self.qkv = linear(width, (groups + 2) * heads * size, rngs)
        self.proj = linear(groups * heads * size, width, rngs)
        self.feed_forward_norm = nnx.Param(jnp.ones(width))
        self.gate_up = linear(width, 2 * hidden, rngs)
        self.down = linear(hidden, width, rngs)
        if config.norm_shards:
            self.q_norm = HeadNorm(config.norm_shards, size)
            self.k_norm = HeadNorm(config.norm_shards, size)


@dataclass(frozen=True)
class Finished:
    """Finished queries, which carry the attention scale, keys and values of a layer; query head n
    reads the keys of head n // G. It answers as a `Projection` does."""

    q: Float[Array, "R Q T H"]
    k: Float[Array, "R N T H"]
    v: Float[Array, "R N T H"]

    def queries(self) -> Float[Array, "R Q T H"]:
        return self.q

    def keys(self) -> Float[Array, "R N T H"]:
        return self.k

    def values(self) -> Float[Array, "R N T H"]:
        return self.v


class LlamaDecoder(NextTokenTransformer):
    """Base of decoders whose layers are `LlamaBlock`: a Llama's feed-forward, RMS norms, logits
    that are guided as uncond + cfg * (cond - uncond).

    The residual stream is float32 whatever the type of the weights; published code rounds it to
    that type after every sum.

    halves: how heads are turned (`pallas_kernels.token_products.Angles`).
    """

    halves: ClassVar[bool] = False

    def splits(self) -> dict[str, Split]:
        return {
            "qkv.kernel": Split(2, HEADS, parts=(self.config.queries_per_head, 1, 1)),
            "proj.kernel": Split(1, HEADS),
            "gate_up.kernel": Split(2, HIDDEN, parts=(1, 1)),
            "down.kernel": Split(1, HIDDEN),
        }

    def token_layers(self, implementation: str | None) -> TokenLayers:
        return where_they_fit(self, implementation)

    def rms_norm(self, x: Float[Array, "R T D"], scale: nnx.Param) -> Float[Array, "R T D"]:
        """Normalised `x` in the type of the weights."""
        return layers.rms_norm(x, scale[...], self.config.norm_eps, self.dtype)

    def post_attention(
        self,
        block: LlamaBlock,
        x: Float[Array, "R T D"],
        attended: Float[Array, "R T Q H"],
        drop: Callable = as_it_is,
    ) -> Float[Array, "R T D"]:
        """Attention's output projection and the feed-forward, with norms before them, or where
        `norm_after` says so behind them."""
        after, axis = self.config.norm_after, self.model_axis
        attended = attended.reshape(*attended.shape[:2], -1).astype(self.dtype)
        branch = layers.contract(block.proj, attended, axis).astype(jnp.float32)
        if after:
            branch = self.rms_norm(branch, block.attention_norm).astype(jnp.float32)
        x = x + drop(branch, 0)
        h = x.astype(self.dtype) if after else self.rms_norm(x, block.feed_forward_norm)
        gate, up = jnp.split(block.gate_up(h), 2, axis=-1)
        branch = layers.contract(block.down, jax.nn.silu(gate) * up, axis).astype(jnp.float32)
        if after:
            branch = self.rms_norm(branch, block.feed_forward_norm).astype(jnp.float32)
        return x + drop(branch, 1)

    def plain_logits(self, x: Float[Array, "R T D"]) -> Float[Array, "R T V"]:
        h = self.rms_norm(x, self.norm)
        return self.head.product(h, jnp.float32)

    def logits(
        self, x: Float[Array, "R T D"], index: Int[Array, "*T_1"], sampling: Sampling
    ) -> Scores:
        """Guidance: uncond + cfg * (cond - uncond). With `cfg_interval` n >= 0 it ends with image
        token n + 1: the first token, which the condition gives, and n + 1 more are guided."""
        tau, strength = None, None
        with jax.named_scope("head"):
            logits = self.plain_logits(x)
        if sampling.tau != 1:
            tau = jnp.float32(sampling.per_scale("tau", 1)[0])
        if self.config.is_guided(sampling):
            strength = jnp.float32(sampling.per_scale("cfg", 1)[0] - 1)
            if sampling.cfg_interval >= 0:
                strength = jnp.where(index <= sampling.cfg_interval + 1, strength, 0)
        return Scores(logits, tau, strength)


class Llama(LlamaDecoder):
    """Base of language models that draw images, whose `config` is a `LlamaConfig`.

    The condition is prompts as token ids: `ids` int32 [B, M], padded on the left, and `length`
    int32 [B]. Positions count from a row's own first token, so that padding changes nothing.
    """

    halves = True

    def condition_shapes(self, images: int, text_tokens: int | None = None):
        slots = self.config.prompt_tokens
        return {
            "ids": jax.ShapeDtypeStruct((images, slots), jnp.int32),
            "length": jax.ShapeDtypeStruct((images,), jnp.int32),
        }

    def prompt_context(self, ids: Int[Array, "R M"], length: Int[Array, " R"]) -> dict[str, Array]:
        """Context of rows whose prompts are the last `length` ids."""
        slots = ids.shape[1]
        return {
            "condition": self.token_embedding[ids].astype(jnp.float32),
            "visible": jnp.arange(slots) >= slots - length[:, None],
            "length": length,
        }

    def rotation(
        self, context: dict, index: Int[Array, " T"]
    ) -> tuple[Float[Array, "R 1 T H"], Float[Array, "R 1 T H"]]:
        """Cosines and sines of every row's own positions, float32. Numbers j and j + H / 2 share an
        angle; the first half of the sines is negative, as `rotate_half` takes them."""
        position = (index + context["length"][:, None]).astype(jnp.float32)
        frequencies = jnp.asarray(_frequencies(self.config.head_dim, self.config.rope_theta))
        angles = position[:, None, :, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)

    def project(self, block: LlamaBlock, rotation: tuple, x: Float[Array, "R T D"]) -> Finished:
        config, groups = self.config, self.config.queries_per_head
        h = x.astype(self.dtype) if config.norm_after else self.rms_norm(x, block.attention_norm)
        heads = block.qkv(h).reshape(*h.shape[:2], -1, config.head_dim)
        own = heads.shape[2] // (groups + 2)  # of this device
        q, k, v = jnp.split(heads, [groups * own, (groups + 1) * own], axis=2)
        if config.norm_shards:
            q = block.q_norm(q, config.num_attention_heads, self.model_axis)
            k = block.k_norm(k, config.num_key_value_heads, self.model_axis)
        q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
        scale = 1 / math.sqrt(config.head_dim)
        # both in float32, rounded once
        q, k = rotate_half(q, *rotation) * scale, rotate_half(k, *rotation)
        return Finished(q.astype(self.dtype), k.astype(self.dtype), v)


@functools.lru_cache(maxsize=32)
def _frequencies(size: int, theta: float) -> np.ndarray:
    """float32 [H / 2]: radians per position of each pair. The same array for all calls, so that a
    program holds it once."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return 1 / np.float32(theta) ** exponents


def rotate_half(
    x: Float[Array, "R N T H"], cos: Float[Array, "R 1 T H"], sin: Float[Array, "R 1 T H"]
) -> Float[Array, "R N T H"]:
    """Rotary embedding, float32: numbers j and j + H / 2 are turned by the angle of their pair."""
    x = x.astype(jnp.float32)
    return x * cos + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin
