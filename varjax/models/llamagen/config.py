"""Configuration of LlamaGen's transformer, in the published constructor's names, and its sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from varjax.errors import UserError, show
from varjax.models.llama.config import MOST_TOKENS, DecoderConfig
from varjax.nn import published
from varjax.sampling import Sampling

TEXT_TOKENS = 120  # of the released text-conditional models
CONDITIONS = {"c2i": "labels", "t2i": "text"}  # what `model_type` says images are made of
# Published arguments and notes that do not change the function computed.
IGNORED_NAMES = frozenset(
    "note initializer_range drop_path_rate max_batch_size max_seq_len token_dropout_p"
    " attn_dropout_p resid_dropout_p ffn_dropout_p".split()
)


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
        found = cls.arguments(arguments, IGNORED_NAMES, n_kv_head=object)
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
        """Height and width of the map of image tokens."""
        side = math.isqrt(self.block_size)
        return side, side

    @property
    def has_unconditional(self) -> bool:
        """Whether there is a condition that stands for none; texts always have one."""
        return self.condition == "text" or self.class_dropout_prob > 0

    # --- sampling ---------------------------------------------------------------------------------

    def check_sampling(self, sampling: Sampling) -> Sampling:
        super().check_sampling(sampling)
        if self.is_guided(sampling) and not self.has_unconditional:
            raise UserError(
                f"cfg={sampling.cfg}: this model was trained without a class for none"
                " (class_dropout_prob 0), so there is no guidance: choose cfg=1"
            )
        return sampling

    def is_guided(self, sampling: Sampling) -> bool:
        """Whether there are unconditional rows: the published code has them where cfg is above
        1."""
        return sampling.per_scale("cfg", 1)[0] > 1


def _preset(layers: int, width: int, heads: int, pixels: int, **text) -> LlamaGenConfig:
    tokens = (pixels // 16) ** 2
    return LlamaGenConfig(n_layer=layers, dim=width, n_head=heads, block_size=tokens, **text)


_SIZES = {"b": (12, 768, 12), "l": (24, 1024, 16), "xl": (36, 1280, 20), "xxl": (48, 1536, 24)}
_SIZES |= {"3b": (24, 3200, 32)}
_TEXT = {"model_type": "t2i", "num_classes": 0, "caption_dim": 2048, "cls_token_num": TEXT_TOKENS}
PRESETS = {
    f"llamagen-{name}-{pixels}": _preset(*size, pixels)
    for name, size in _SIZES.items()
    for pixels in (256, 384)
}
PRESETS |= {f"llamagen-t2i-xl-{n}": _preset(*_SIZES["xl"], n, **_TEXT) for n in (256, 512)}
