"""Janus-Pro: a language model that draws pictures of image tokens (Chen et al. 2025, arXiv
2501.17811). Only the part that draws is here: no vision tower, and no head for text.

Image tokens have an embedding of their own, which an aligner widens, and a head of their own. Names
of the original implementation are in `ported_weights/tables/janus.py`.

Letters: B images, R rows, M slots of the condition, T tokens, D width, V codes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.core import stacked
from varjax.core.errors import UserError, about, nearest, show
from varjax.models.llama.config import LlamaConfig
from varjax.models.llama.decoder import Llama, LlamaBlock, linear, table
from varjax.storage import published
from varjax.text.prompt_tokenizer import PromptTokenizer

RELEASED_GRID = (24, 24)  # 384 pixels
USER, ASSISTANT = "<|User|>", "<|Assistant|>"
BEGIN, IMAGE_START = "<｜begin▁of▁sentence｜>", "<begin_of_image>"
PAD = 100002  # id of `<|_pad_|>` in the released tokenizer
# Sections of config.json, and what this class calls the values that generation needs.
SECTIONS = {
    "gen_head_config": {
        "image_token_embed": "head_hidden",
        "image_token_size": "vocab_size",
        "n_embed": "hidden_size",
    },
    "gen_aligner_config": {"input_dim": "code_dim", "n_embed": "hidden_size"},
    "gen_vision_config": {"image_token_size": "vocab_size", "n_embed": "code_dim"},
}
OWN = ("pad_id", "grid", "prompt_tokens")  # names of ours beside them
KINDS = {"depth": 2, "projector_type": "mlp_gelu"}  # of the aligner; all released models
IGNORED = frozenset(
    "aligner_config architectures model_type note torch_dtype transformers_version"
    " vision_config vq_tiny".split()
)


@dataclass(frozen=True, kw_only=True)
class JanusConfig(LlamaConfig):
    """Shape of a Janus-Pro transformer, in the names of its published config.json.

    code_dim: width of the embedding of image tokens, which the aligner widens to `hidden_size`.
    head_hidden: width inside the head.
    pad_id: stands for the prompt in unconditional rows.
    grid: height and width of an image, in tokens.
    """

    what = "Janus-Pro"

    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 16384
    text_vocab_size: int = 102400
    vocab_size: int = 16384
    code_dim: int = 8
    head_hidden: int = 2048
    pad_id: int = PAD
    grid: published.INTEGERS = RELEASED_GRID
    prompt_tokens: int = 32

    def __post_init__(self):
        self.check_language_model(self.grid, pad_id=(0, self.text_vocab_size - 1))
        if self.num_attention_heads != self.num_key_value_heads:
            raise self.wrong("num_key_value_heads must be num_attention_heads, as in all releases")

    @classmethod
    def from_published(cls, given: Mapping) -> "JanusConfig":
        """Reads config.json. `pad_id`, `grid` and `prompt_tokens` are our own names there.
        `UserError`: unknown names, wrong types, sections that contradict each other."""
        own = {n: given[n] for n in OWN if n in given}
        known = ("language_config", *SECTIONS, *OWN)
        for name in given:
            if name not in known and name not in IGNORED:
                words = f"known are {', '.join(known)}{nearest(name, known)}"
                raise cls.wrong(f"unknown name {name!r}: {words}")
        with about("language_config"):
            found = cls.language_arguments(cls.inside(given, "language_config"))
        for section, names in SECTIONS.items():
            params = cls.inside(cls.inside(given, section), "params")
            for name, ours in names.items():
                if name not in params:
                    continue
                value = cls.arguments({ours: params[name]})[ours]
                if found.setdefault(ours, value) != value:
                    raise cls.wrong(f"{section}: {name} is {value}, elsewhere it is {found[ours]}")
            for name, wanted in KINDS.items():
                if params.get(name, wanted) != wanted:
                    raise cls.wrong(f"{section}: {name} is {show(params[name])}, not {wanted!r}")
        return cls(**found, **cls.arguments(own))

    def to_published(self) -> dict:
        """The layout of config.json: the inverse of `from_published`."""
        sections = {
            section: {"params": {name: getattr(self, ours) for name, ours in names.items()}}
            for section, names in SECTIONS.items()
        }
        own = {"pad_id": self.pad_id, "grid": list(self.grid), "prompt_tokens": self.prompt_tokens}
        names = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
        names += " num_key_value_heads rms_norm_eps rope_theta max_position_embeddings"
        language = {name: getattr(self, name) for name in names.split()}
        language["vocab_size"] = self.text_vocab_size
        return {"language_config": language, **sections, **own}

    def with_grid(self, grid: tuple[int, int]) -> "JanusConfig":
        """The configuration for images of so many tokens, height x width. Only models of one's own
        know other sizes than the released one: `UserError` for those."""
        grid = tuple(grid)
        released = (replace(c, prompt_tokens=self.prompt_tokens) for c in PRESETS.values())
        if grid != self.grid and self in released:
            raise UserError(
                f"grid={'x'.join(map(str, grid))}: Janus-Pro draws images of 24x24 tokens (384x384 "
                f"pixels): leave it out"
            )
        return self.shaped(grid=grid)

    def encode_prompt(self, text: str, tokenizer: PromptTokenizer) -> list[int]:
        """Ids of the conditional row, as `generation_inference.py` of deepseek-ai/Janus and its
        README for Janus-Pro make them: one turn of the user and the begin of the assistant's in the
        format "deepseek" without a system prompt, then the tag that begins an image. A turn without
        a text has no colon and space. `UserError` if the tokenizer is another model's."""
        text = text.strip()
        turn = f"{USER}: {text}\n\n" if text else f"{USER}:"
        ids = tokenizer.ids(f"{turn}{ASSISTANT}:{IMAGE_START}")
        found = [tokenizer.id_of(BEGIN), *ids]
        tokenizer.check_end(found, IMAGE_START)
        return found

    def check_prompt(self, ids: Sequence[int]) -> None:
        super().check_prompt(ids)
        if len(ids) < 2:
            raise UserError(
                "a prompt of one id: Janus-Pro's have at least the first one (begin of sentence)"
                " and the last one (begin of image)"
            )


PRESETS = {
    "janus-pro-1b": JanusConfig(),
    "janus-pro-7b": JanusConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=30,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_hidden=4096,
    ),
}


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
        self.blocks = stacked.stack(lambda r: LlamaBlock(config, rngs=r), config.depth, rngs)
        self.norm = nnx.Param(jnp.ones(width))
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
