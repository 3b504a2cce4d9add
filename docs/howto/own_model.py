"""A model of my own: a small transformer that draws 8 x 8 tokens, one by one, from class labels."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.projection import Projection
from varjax.core import layers, stacked
from varjax.core.next_token import NextTokenTransformer, as_it_is
from varjax.core.sampling import Scores
from varjax.models import registry
from varjax.models.llama.config import DecoderConfig
from varjax.storage.published import Configuration

CLASSES, CODES, SIDE, PATCH = 10, 64, 8, 4  # SIDE x SIDE tokens, each of PATCH x PATCH pixels


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    what = "my model"
    condition = "labels"
    condition_tokens = 1  # the class
    num_classes: int = CLASSES
    depth: int = 3
    embed_dim: int = 64
    hidden_dim: int = 256
    num_heads: int = 4
    vocab_size: int = CODES
    grid: tuple[int, int] = (SIDE, SIDE)


@dataclass(frozen=True, kw_only=True)
class CodecConfig(Configuration):
    what = "my codec"
    downsample: int = PATCH  # pixels of a token's side
    code_channels: int = 3


class Block(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        width = config.embed_dim
        self.qkv = layers.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.proj = layers.Linear(width, width, rngs=rngs)
        self.up = layers.Linear(width, 4 * width, rngs=rngs)
        self.down = layers.Linear(4 * width, width, rngs=rngs)


class MyTransformer(NextTokenTransformer):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config, width = config, config.embed_dim

        rows = config.num_classes + 1  # the last one is "no class", for guidance
        self.classes = nnx.Param(jax.random.normal(rngs.params(), (rows, width)))
        self.tokens = nnx.Param(jax.random.normal(rngs.params(), (CODES, width)))
        self.blocks = stacked.stack(lambda r: Block(config, rngs=r), config.depth, rngs)
        self.head = layers.Linear(width, config.vocab_size, rngs=rngs)

    def condition_shapes(self, images, text_tokens=None):
        return jax.ShapeDtypeStruct((images,), jnp.int32)

    def encode_condition(self, condition, *, guided):
        null = jnp.full_like(condition, self.config.num_classes)
        labels = jnp.concatenate([condition, null]) if guided else condition
        embedded = self.classes[labels].astype(jnp.float32)[:, None]
        return {"condition": embedded, "visible": jnp.ones((len(labels), 1), bool)}

    def embed(self, context, tokens):
        embedded = self.tokens[tokens].astype(jnp.float32)
        return jnp.tile(embedded, (len(context["condition"]) // len(tokens), 1, 1))

    def rotation(self, context, index):
        half = self.config.head_dim // 2
        angles = (index[:, None] + 1) / 100.0 ** (jnp.arange(half) / half)
        angles = jnp.repeat(angles, 2, axis=-1)  # neighbouring numbers share an angle
        return jnp.cos(angles), jnp.sin(angles)

    def project(self, block, rotation, x):
        size = self.config.head_dim
        h = layers.layer_norm(x, 1e-5).astype(self.dtype)
        qkv = block.qkv(h).reshape(*h.shape[:2], 3, -1, size)
        return Projection(qkv, rotation=rotation, scale=1 / math.sqrt(size))

    def post_attention(self, block, x, attended, drop=as_it_is):
        attended = attended.reshape(*x.shape[:2], -1).astype(self.dtype)
        x = x + block.proj(attended).astype(jnp.float32)
        h = jax.nn.gelu(block.up(layers.layer_norm(x, 1e-5).astype(self.dtype)))
        return x + block.down(h).astype(jnp.float32)

    def logits(self, x, index, sampling):
        plain = self.head(layers.layer_norm(x, 1e-5).astype(self.dtype)).astype(jnp.float32)
        guided = self.config.is_guided(sampling)
        return Scores(plain, None, jnp.float32(sampling.cfg - 1) if guided else None)


class MyCodec(nnx.Module):
    """A token is a patch of one colour."""

    def __init__(self, config: CodecConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.colours = nnx.Param(jax.random.uniform(rngs.params(), (CODES, 3), minval=-1))

    def code_map(self, tokens, grid):
        return self.colours[tokens].reshape(len(tokens), *grid, 3)

    def decode(self, code_map, dtype=jnp.float32):
        return jnp.repeat(jnp.repeat(code_map, PATCH, axis=1), PATCH, axis=2)


CONFIGS = {"transformer": Config(), "codec": CodecConfig()}
registry.register(  # without `weights=` they are random; a function may read a file of yours
    "my-model", transformer=MyTransformer, codec=MyCodec, configs=CONFIGS, sampling={"cfg": 2.0}
)
