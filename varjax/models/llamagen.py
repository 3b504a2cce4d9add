"""LlamaGen: a Llama that draws image tokens in raster order (Sun et al. 2024, arXiv 2406.06525).

Letters: R rows, M tokens of the condition, T tokens, E text channels, N heads, H head size, D
width, F hidden width, V vocabulary. Names of the original implementation are in
`ported_weights/tables/llamagen.py`.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.projection import Projection
from varjax.core import stacked
from varjax.core.errors import UserError, show
from varjax.core.sampling import Sampling
from varjax.models.llama.config import MOST_TOKENS, DecoderConfig
from varjax.models.llama.decoder import LlamaBlock, LlamaDecoder, linear, table
from varjax.storage import published
from varjax.text.features import text_shapes

TEXT_TOKENS = 120  # of the released text-conditional models
CONDITIONS = {"c2i": "labels", "t2i": "text"}  # what `model_type` says images are made of


@dataclass(frozen=True, kw_only=True)
class LlamaGenConfig(DecoderConfig):
    """Shape of a LlamaGen transformer; field names are the published ones.

    model_type: "c2i", images of classes, or "t2i", images of texts.
    num_classes: classes that images are made of; 0 where they are made of texts.
    caption_dim: width of the text features; 0 where images are made of classes.
    cls_token_num, block_size: tokens of the condition, and of the image, which is square.
    multiple_of, ffn_dim_multiplier: the feed-forward's width is 8/3 of `dim`, times the second
      where it is given, rounded up to a multiple of the first.
    class_dropout_prob: training: how often the condition is left out. If it is 0, there is no class
      that stands for none, and no guidance.
    """

    what = "LlamaGen"
    ignored = frozenset(
        "note initializer_range drop_path_rate max_batch_size max_seq_len token_dropout_p"
        " attn_dropout_p resid_dropout_p ffn_dropout_p".split()
    )

    model_type: object = "c2i"
    dim: int = 4096
    n_layer: int = 32
    n_head: int = 32
    multiple_of: int = 256
    ffn_dim_multiplier: object = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    vocab_size: int = 16384
    num_classes: int = 1000
    caption_dim: int = 0
    class_dropout_prob: float = 0.1
    cls_token_num: int = 1
    block_size: int = 256

    def __post_init__(self):
        if self.model_type not in CONDITIONS:
            raise self.wrong(f"model_type is {self.model_type!r:.40}, it must be c2i or t2i")
        factor, is_text = self.ffn_dim_multiplier, self.condition == "text"
        if factor is not None and (type(factor) not in (int, float) or not 0 < factor < 1e6):
            raise self.wrong(
                f"ffn_dim_multiplier is {factor!r:.40}, it must be a number greater than 0, or null"
            )
        self.check_numbers(
            "rope_base",
            n_layer=(1, published.LARGEST_DEPTH),
            block_size=(1, MOST_TOKENS),
            num_classes=(0, 0) if is_text else (1, published.LARGEST_SIZE),
            caption_dim=(1, published.LARGEST_SIZE) if is_text else (0, 0),
            cls_token_num=(1, 4096 if is_text else 1),
        )
        self.check_size("the feed-forward's width", self.hidden_dim)
        if not 0 <= self.class_dropout_prob < 1:
            raise self.wrong(f"class_dropout_prob {self.class_dropout_prob} is outside [0, 1)")
        self.check_multiple("dim", self.dim, self.n_head, "n_head ")
        # half of the rotated pairs for rows, half for columns
        self.check_multiple("head size (dim / n_head)", self.head_dim, 4)
        if math.isqrt(self.block_size) ** 2 != self.block_size:
            raise self.wrong(f"block_size {self.block_size} is no square: images are n x n tokens")

    # --- published names --------------------------------------------------------------------------

    @classmethod
    def from_published(cls, arguments: Mapping) -> "LlamaGenConfig":
        """Reads the published constructor's names; what is left out has the published default.
        `UserError` for an unknown name, a value of the wrong type, or grouped queries, which no
        released model has."""
        found = cls.arguments(arguments, n_kv_head=object)
        kv_heads = found.pop("n_kv_head", None)
        if kv_heads not in (None, found.get("n_head", cls.n_head)):
            raise cls.wrong(
                f"n_kv_head={show(kv_heads)} is not supported: released models have as many key "
                "heads as query heads (n_kv_head null)"
            )
        is_text = found.get("model_type") == "t2i"
        if is_text:
            found.setdefault("caption_dim", 2048)
        return cls(**found | ({"num_classes": 0} if is_text else {"caption_dim": 0}))

    # --- what follows, by the names that all models have ------------------------------------------

    depth = property(attrgetter("n_layer"))
    embed_dim = property(attrgetter("dim"))
    num_heads = property(attrgetter("n_head"))
    condition_tokens = property(attrgetter("cls_token_num"))  # M: padding included
    text_channels = property(attrgetter("caption_dim"))
    text_maxlen = property(attrgetter("cls_token_num"))
    null_label = property(attrgetter("num_classes"))  # the class embedding that is "no class"

    @property
    def hidden_dim(self) -> int:
        width = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of

    @property
    def condition(self) -> str:
        """The condition of images, "labels" or "text"."""
        return CONDITIONS[self.model_type]

    @property
    def grid(self) -> tuple[int, int]:
        side = math.isqrt(self.block_size)
        return side, side

    @property
    def has_unconditional(self) -> bool:
        """Whether there is a condition that stands for none; texts always have one."""
        return self.condition == "text" or self.class_dropout_prob > 0

    def check_sampling(self, sampling: Sampling) -> Sampling:
        super().check_sampling(sampling)
        if self.is_guided(sampling) and not self.has_unconditional:
            raise UserError(
                f"cfg={sampling.cfg}: this model was trained without a class for none"
                " (class_dropout_prob 0), so there is no guidance: choose cfg=1"
            )
        return sampling

    def is_guided(self, sampling: Sampling) -> bool:
        """Whether there are unconditional rows: they are there where cfg is above 1."""
        return sampling.per_scale("cfg", 1)[0] > 1


_SIZES = {"b": (12, 768, 12), "l": (24, 1024, 16), "xl": (36, 1280, 20), "xxl": (48, 1536, 24)}
_SIZES |= {"3b": (24, 3200, 32)}
_TEXT = {"model_type": "t2i", "num_classes": 0, "caption_dim": 2048, "cls_token_num": TEXT_TOKENS}
PRESETS = {
    f"llamagen-{name}-{pixels}": LlamaGenConfig(
        n_layer=layers, dim=width, n_head=heads, block_size=(pixels // 16) ** 2
    )
    for name, (layers, width, heads) in _SIZES.items()
    for pixels in (256, 384)
}
PRESETS |= {
    f"llamagen-t2i-xl-{n}": replace(PRESETS["llamagen-xl-256"], block_size=(n // 16) ** 2, **_TEXT)
    for n in (256, 512)
}


class LlamaGen(LlamaDecoder):
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
        self.blocks = stacked.stack(lambda r: LlamaBlock(config, rngs=r), config.n_layer, rngs)
        self.norm = nnx.Param(jnp.ones(width))
        self.head = linear(width, config.vocab_size, rngs, jax.nn.initializers.zeros)

    # --- once per image ---------------------------------------------------------------------------

    def condition_shapes(self, images: int, text_tokens: int | None = None):
        if self.config.condition == "labels":
            return jax.ShapeDtypeStruct((images,), jnp.int32)
        return text_shapes(self.config, images, text_tokens)

    def encode_condition(self, condition, *, guided: bool) -> dict[str, Array]:
        """The unconditional rows have the null class. With texts they have the negative text, or
        without one the learned unconditional text with as many visible tokens as the image's."""
        if self.config.condition == "labels":
            labels = condition
            if guided:
                null = jnp.full_like(labels, self.config.null_label)
                labels = jnp.concatenate([labels, null])
            embedded = self.class_embedding[labels].astype(jnp.float32)
            return {"condition": embedded[:, None], "visible": jnp.ones((len(labels), 1), bool)}
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

    def project(self, block: LlamaBlock, rotation: tuple, x: Float[Array, "R T D"]) -> Projection:
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
