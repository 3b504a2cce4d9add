"""A module that exists already, and the adapter under which varjax draws with it."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.projection import Projection
from varjax.core.next_token import NextTokenTransformer, as_it_is
from varjax.core.sampling import Scores
from varjax.models import registry
from varjax.models.llama.config import DecoderConfig
from varjax.storage.published import Configuration

# --- what exists: it knows nothing of varjax, and stays as it is ----------------------------------

CLASSES, CODES, SIDE, WIDTH, HEADS, DEPTH = 10, 64, 6, 64, 4, 2


def rope(x, positions):
    """Rotates halves of heads [B, T, N, H], as language models do."""
    a, b = jnp.split(x, 2, axis=-1)
    angles = (positions[:, None] / 100.0 ** (jnp.arange(a.shape[-1]) / a.shape[-1]))[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(4)
        )

    def qkv(self, x, positions):
        q, k, v = (p(x) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (a.reshape(*x.shape[:2], HEADS, -1) for a in (q, k, v))
        return rope(q, positions), rope(k, positions), v

    def __call__(self, x, positions):
        out = jax.nn.dot_product_attention(*self.qkv(x, positions), is_causal=True)
        return self.o_proj(out.reshape(x.shape))


class Layer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attn = Attention(rngs=rngs)
        self.mlp_in = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def mlp(self, x):
        return self.mlp_out(jax.nn.gelu(self.mlp_in(self.norm2(x))))

    def __call__(self, x, positions):
        x = x + self.attn(self.norm1(x), positions)
        return x + self.mlp(x)


class ImageGPT(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.cls = nnx.Embed(CLASSES + 1, WIDTH, rngs=rngs)  # the last one is "no class"
        self.wte = nnx.Embed(CODES, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs=rngs) for _ in range(DEPTH)])
        self.ln_f = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, CODES, use_bias=False, rngs=rngs)

    def __call__(self, classes, codes):
        """Logits [B, T + 1, V] of codes 0 to T, from classes [B] and codes [B, T]."""
        x = jnp.concatenate([self.cls(classes)[:, None], self.wte(codes)], axis=1)
        for layer in self.layers:
            x = layer(x, jnp.arange(x.shape[1]))
        return self.lm_head(self.ln_f(x))


def trained() -> ImageGPT:
    """The module with its weights; yours reads a file here."""
    return ImageGPT(rngs=nnx.Rngs(7))


# --- the adapter ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    what, condition, condition_tokens = "ImageGPT", "labels", 1
    num_classes: int = CLASSES
    depth: int = DEPTH
    embed_dim: int = WIDTH
    hidden_dim: int = 4 * WIDTH
    num_heads: int = HEADS
    vocab_size: int = CODES
    grid: tuple[int, int] = (SIDE, SIDE)


class Adapter(NextTokenTransformer):
    def __init__(self, config: Config, *, rngs: nnx.Rngs, theirs: ImageGPT | None = None):
        self.config, theirs = config, theirs or ImageGPT(rngs=rngs)
        self.cls, self.wte, self.ln_f = theirs.cls, theirs.wte, theirs.ln_f
        self.head = theirs.lm_head
        # one stack of all layers; in a Dict, so that nothing in them is exchanged
        self.blocks = nnx.Dict(layer=jax.tree.map(lambda *a: jnp.stack(a), *theirs.layers))

    def condition_shapes(self, images, text_tokens=None):
        return jax.ShapeDtypeStruct((images,), jnp.int32)

    def encode_condition(self, condition, *, guided):
        null = jnp.full_like(condition, CLASSES)
        labels = jnp.concatenate([condition, null]) if guided else condition
        embedded = self.cls(labels).astype(jnp.float32)[:, None]
        return {"condition": embedded, "visible": jnp.ones((len(labels), 1), bool)}

    def embed(self, context, tokens):
        embedded = self.wte(tokens).astype(jnp.float32)
        return jnp.tile(embedded, (len(context["condition"]) // len(tokens), 1, 1))

    def rotation(self, context, index):
        return index + 1  # their positions: the class is 0; `project` gets what this returns

    def project(self, block, rotation, x):
        q, k, v = block.layer.attn.qkv(block.layer.norm1(x).astype(self.dtype), rotation)
        qkv = jnp.stack([q, k, v], axis=2).astype(self.dtype)
        return Projection(qkv, scale=1 / math.sqrt(self.config.head_dim))

    def post_attention(self, block, x, attended, drop=as_it_is):
        attended = attended.reshape(*x.shape[:2], -1).astype(self.dtype)
        x = x + block.layer.attn.o_proj(attended).astype(jnp.float32)
        return x + block.layer.mlp(x).astype(jnp.float32)

    def logits(self, x, index, sampling):
        plain = self.head(self.ln_f(x)).astype(jnp.float32)
        guided = self.config.is_guided(sampling)
        return Scores(plain, None, jnp.float32(sampling.cfg - 1) if guided else None)


# --- pictures: a token is a patch of 4 x 4 pixels of one grey -------------------------------------


@dataclass(frozen=True, kw_only=True)
class CodecConfig(Configuration):
    what, downsample, code_channels = "grey codec", 4, 3


class Codec(nnx.Module):
    def __init__(self, config: CodecConfig, *, rngs: nnx.Rngs):
        self.config, self.greys = config, nnx.Param(jnp.linspace(-1, 1, CODES))

    def code_map(self, tokens, grid):
        return jnp.repeat(self.greys[tokens].reshape(len(tokens), *grid, 1), 3, axis=-1)

    def decode(self, code_map, dtype=jnp.float32):
        return jnp.repeat(jnp.repeat(code_map, 4, axis=1), 4, axis=2)


CONFIGS = {"transformer": Config(), "codec": CodecConfig()}


def weights():
    adapter = Adapter(CONFIGS["transformer"], rngs=nnx.Rngs(0), theirs=trained())
    return {"transformer": adapter, "codec": Codec(CONFIGS["codec"], rngs=nnx.Rngs(0))}


registry.register("image-gpt", transformer=Adapter, codec=Codec, configs=CONFIGS, weights=weights)
