"""Configurations of models that draw token by token, and of those among them that
are language models of the Llama family."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Self

from varjax.core.arguments import integer
from varjax.core.errors import UserError, show
from varjax.core.sampling import Sampling
from varjax.storage import published

MOST_TOKENS = 2**16  # of an image: a grid of 256 x 256
LONGEST_PROMPT = 2**14


class DecoderConfig(published.TransformerConfig):
    """Base of models that draw token by token. Subclasses have `grid`, height and width of the
    map of image tokens, and `condition_tokens`, the slots of the condition."""

    grid: tuple[int, int]
    logits_per_token = property(attrgetter("vocab_size"))
    norm_after = False  # whether layers normalise what a branch gives, not what it takes
    norm_shards = 0  # sets of weights of the norm of queries and keys; 0: there is none

    @property
    def image_tokens(self) -> int:
        """N: tokens of an image in the order in which they are drawn."""
        return math.prod(self.grid)

    @property
    def token_maps(self) -> tuple[tuple[int, int], ...]:
        return (self.grid,)

    def condition_bytes(self, rows: int, item_size: int, text_tokens: int | None = None) -> int:
        """0: layers hold nothing of the condition beside the cache, in which it lies."""
        return 0

    def check_sampling(self, sampling: Sampling) -> Sampling:
        sampling.check(1, self.vocab_size)
        self.check_mixing(sampling)
        if sampling.more_smooth:
            raise UserError(f"more_smooth mixes codes of scales; {self.what} draws tokens: drop it")
        return sampling

    def is_guided(self, sampling: Sampling) -> bool:
        """Whether there are unconditional rows: there are none with a strength of 1."""
        return sampling.per_scale("cfg", 1)[0] != 1


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Shape of a language model that draws images; field names are those of published files.

    hidden_size: width D. intermediate_size: of the feed-forward, F.
    num_key_value_heads: N; every one of them serves equally many of the query heads.
    max_position_embeddings: most tokens of prompt and image together.
    text_vocab_size: token ids of the language model, published as `vocab_size`.
    vocab_size: V, codes of image tokens.
    prompt_tokens: M, slots of the condition; shorter prompts are padded to them.
    """

    condition = "prompt_ids"
    fixed = {"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "hidden_act": "silu"}
    ignored = frozenset(
        "architectures attention_dropout bos_token_id dropout eos_token_id initializer_range"
        " mask_image_logits max_sequence_length model_type pad_token_id pretraining_tp"
        " tie_word_embeddings torch_dtype transformers_version use_cache vq_config z_loss_weight"
        " _attn_implementation _attn_implementation_internal _name_or_path dtype aligner_config"
        " vision_config note".split()
    )

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    rope_theta: float = 10000.0
    max_position_embeddings: int
    text_vocab_size: int
    vocab_size: int
    prompt_tokens: int

    def check_language_model(self, grid: Sequence[int], **limits: tuple[float, float]) -> None:
        """Raises `UserError` for impossible sizes. grid: height and width, in any unit. limits: see
        `check_numbers`."""
        if len(grid) != 2 or not all(1 <= side <= MOST_TOKENS for side in grid):
            raise self.wrong(f"grid {list(grid)} must be a height and a width")
        limits["num_hidden_layers"] = 1, published.LARGEST_DEPTH
        self.check_numbers("rope_theta", prompt_tokens=(1, LONGEST_PROMPT), **limits)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads or self.head_dim % 2:
            raise self.wrong(
                f"hidden_size {self.hidden_size} over {heads} heads: heads must have an even size"
            )
        self.check_multiple("num_attention_heads", heads, kv_heads, "num_key_value_heads ")
        if not 2 <= self.image_tokens <= MOST_TOKENS:
            raise self.wrong(
                f"images of {'x'.join(map(str, self.grid))} tokens: at least 2, at most "
                f"{MOST_TOKENS}"
            )
        self.check_context(self.prompt_tokens)

    @classmethod
    def language_arguments(cls, given: Mapping) -> dict:
        """Fields from a published language configuration. `UserError` for unknown names, for values
        of the wrong type, and for what would be another function."""
        found = cls.arguments(given, head_dim=object)
        size = found.pop("head_dim", None)
        if "vocab_size" in found:
            found["text_vocab_size"] = found.pop("vocab_size")
        if found.get("num_key_value_heads") is None and "num_attention_heads" in found:
            found["num_key_value_heads"] = found["num_attention_heads"]
        heads = found.get("num_attention_heads", 1)
        # impossible numbers of heads have a message of their own
        wide = found.get("hidden_size", 0) // max(1, heads)
        if heads > 0 and size not in (None, wide):
            raise cls.wrong(f"head_dim={show(size)}: it must be hidden_size over the heads, {wide}")
        return found

    # --- what follows, by the names that all models have ------------------------------------------

    depth = property(attrgetter("num_hidden_layers"))
    embed_dim = property(attrgetter("hidden_size"))
    hidden_dim = property(attrgetter("intermediate_size"))
    norm_eps = property(attrgetter("rms_norm_eps"))
    num_heads = property(attrgetter("num_key_value_heads"))  # N: those that the cache has
    condition_tokens = property(attrgetter("prompt_tokens"))  # M: padding included

    @property
    def queries_per_head(self) -> int:
        """G: query heads that share a head of keys and values."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def shaped(self, **changes) -> Self:
        """The configuration with other fields that say how large images are. Slots for a prompt
        that then have no room in the context go."""
        bare = replace(self, prompt_tokens=1, **changes)  # raises if the image alone has no room
        room = self.max_position_embeddings - bare.image_tokens
        return replace(bare, prompt_tokens=min(self.prompt_tokens, room))

    # --- prompts ----------------------------------------------------------------------------------

    def check_context(self, length: int) -> None:
        """Raises `UserError` if a prompt of this length and an image are too long together."""
        total = length + self.image_tokens
        if total > self.max_position_embeddings:
            raise UserError(
                f"a prompt of {length} token{'s'[length == 1 :]} and {self.image_tokens} image "
                f"tokens are {total}, {self.what} takes at most {self.max_position_embeddings}: "
                f"choose a shorter prompt or a smaller image"
            )

    def with_prompt_tokens(self, count: int) -> Self:
        """The configuration with so many slots for prompts. `UserError` if they leave no room."""
        return replace(self, prompt_tokens=integer("prompt_tokens", count, 1, LONGEST_PROMPT))

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raises `UserError` if these ids are no prompt of this model."""
        wrong = sorted({int(i) for i in ids if not 0 <= i < self.text_vocab_size})
        if wrong:
            raise UserError(
                f"prompt ids {', '.join(map(str, wrong[:8]))} are outside the vocabulary: "
                f"{self.what} has 0 to {self.text_vocab_size - 1}"
            )
        self.check_context(len(ids))
