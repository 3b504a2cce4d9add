"""Lumina-mGPT: Chameleon's transformer, tuned to draw pictures of many sizes (Liu et al. 2024,
arXiv 2408.02657; Chameleon: arXiv 2405.09818).

An image is written line by line, with a new line behind every line; the prompt ends with its height
and width. Tokens are numbered by the codes of the image tokenizer here; V is the new line.

Letters: B images, R rows, M slots of the condition, T tokens, Q query heads, H head size, D width,
V codes. Names of the original implementation are in `ported_weights/tables/lumina.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.core import stacked
from varjax.core.errors import UserError, about, show, some
from varjax.models.llama.config import LlamaConfig
from varjax.models.llama.decoder import Llama, LlamaBlock, linear, table
from varjax.storage import published
from varjax.text.prompt_tokenizer import PromptTokenizer

PATCH = 2  # latent cells per side of a unit of the grammar, 32 pixels in released models
IMAGE_TOKEN, DIGITS = re.compile(r"IMGIMG([A-J]{1,9})Z"), str.maketrans("ABCDEFGHIJ", "0123456789")
BEGIN, END_OF_TURN, IMAGE_START = "<s>", "<reserved08706>", "<racm3:break>"
LONGEST = 4  # times the other side, of pictures that the model was trained on
UNIT = 32  # pixels, in the sentence that the model was trained on
SIZES_FROM = 8800  # the token of n units is <reserved{8800 + n}>
IDS = ("image_start", "new_line", "size_zero", "first_image")  # checked against the vocabulary
GRAMMAR = {  # names in the file of a custom model: ours
    "boi": "image_start",
    "newline": "new_line",
    "grid0": "size_zero",
}


@dataclass(frozen=True, kw_only=True)
class LuminaConfig(LlamaConfig):
    """Shape of a Lumina-mGPT transformer.

    swin_norm: layers normalise what a branch gives, not what it takes (34B).
    model_parallel_size: sets of weights that the norm of queries and keys has; each serves equally
      many neighbouring heads.
    units: height and width of an image as its grammar counts them: 2 x 2 image tokens each.
    image_start, new_line: ids. size_zero: the id of height or width n is `size_zero` + n.
    image_ids: for every code of the image tokenizer the id of its token; empty: from `first_image`
      on in order.
    """

    what = "Lumina-mGPT"

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 10240
    text_vocab_size: int = 65536
    vocab_size: int = 8192
    swin_norm: bool = False
    model_parallel_size: int = 1
    units: published.INTEGERS = (24, 24)
    prompt_tokens: int = 70
    image_start: int = 8197
    new_line: int = 8803
    size_zero: int = 8804
    first_image: int = 4
    image_ids: published.INTEGERS = ()

    def __post_init__(self):
        anything = -published.LARGEST_SIZE, published.LARGEST_SIZE
        self.check_language_model(self.units, **dict.fromkeys(IDS, anything))
        for name in ("num_attention_heads", "num_key_value_heads"):
            shards = self.model_parallel_size
            self.check_multiple(name, getattr(self, name), shards, "model_parallel_size ")
        ids = self.token_ids
        if self.image_ids and len(self.image_ids) != self.vocab_size:
            raise self.wrong(
                f"image_ids lists {len(self.image_ids)} ids for {self.vocab_size} codes"
            )
        if wrong := [i for i in (*ids, *self.opening) if not 0 <= i < self.text_vocab_size]:
            # where nothing names them, the ids are those of released models
            cause = "" if self.image_ids else " (no vocabulary names the image tokens; num_codes)"
            raise self.wrong(
                f"ids {some(map(str, wrong), 8)} are outside the vocabulary of "
                f"{self.text_vocab_size}{cause}"
            )
        if len({*ids, *self.opening[:2]}) < len(ids) + 2 or self.opening[2] in ids:
            raise self.wrong(
                "ids of image tokens, of the new line, and of image start, height and width must "
                "all differ"
            )

    @classmethod
    def from_published(cls, given: Mapping) -> "LuminaConfig":
        """Reads a published config.json, or {"model", "grammar", "image_vocab"} of a custom model.

        Our own names may stand in either. A vocabulary (`vocabulary_map` or `image_vocab`, names to
        ids) gives `image_ids`. `UserError` for unknown names and values of the wrong type.
        """
        model = {**given, **cls.inside(given, "model")}
        grammar = cls.inside(model, "grammar")
        names = model.pop("image_vocab", None) or model.pop("vocabulary_map", None)
        for name in ("model", "grammar", "vqgan", "image_vocab", "vocabulary_map"):
            model.pop(name, None)
        # our name: `vocab_size` is the language model's in published files
        codes = cls.arguments({"vocab_size": model.pop("num_codes", cls.vocab_size)})
        found = cls.language_arguments(model) | codes
        ids = {ours: grammar[name] for name, ours in GRAMMAR.items() if name in grammar}
        found |= cls.arguments(ids)
        if names is not None:
            with about("vocabulary"):
                ids = image_ids(names)
            found |= {"image_ids": ids, "vocab_size": len(ids), "first_image": min(ids)}
        return cls(**found)

    def to_published(self) -> dict:
        """The inverse of `from_published`: `vocab_size` is the language model's there."""
        found = super().to_published()
        found["num_codes"] = found["vocab_size"]
        return found | {"vocab_size": found.pop("text_vocab_size")}

    # --- what follows -----------------------------------------------------------------------------

    norm_after = property(attrgetter("swin_norm"))
    norm_shards = property(attrgetter("model_parallel_size"))

    @property
    def grid(self) -> tuple[int, int]:
        height, width = self.units
        return PATCH * height, PATCH * width

    @property
    def image_tokens(self) -> int:
        """N: image tokens, and a new line behind every line of them."""
        height, width = self.grid
        return height * (width + 1)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Published ids of the codes in order, then of the new line."""
        first = self.first_image
        ids = self.image_ids or range(first, first + self.vocab_size)
        return (*ids, self.new_line)

    @property
    def opening(self) -> tuple[int, int, int]:
        """Ids that every prompt ends with: image start, height, width."""
        height, width = self.units
        return self.image_start, self.size_zero + height, self.size_zero + width

    # --- prompts and sizes ------------------------------------------------------------------------

    def encode_prompt(self, text: str, tokenizer: PromptTokenizer) -> list[int]:
        """Token ids as `generate_examples/generate.py` of Alpha-VLLM/Lumina-mGPT makes them: the
        begin of a sentence, the user's turn with the size in pixels, its separator. The model draws
        what follows there; here image start, height and width are part of the prompt, so that all
        images have the shape that was asked for. `UserError` if the tokenizer is another model's.
        """
        height, width = (UNIT * count for count in self.units)
        request = (
            f"Generate an image of {width}x{height} according to the following prompt:\n{text}"
        )
        turn = tokenizer.ids(request + END_OF_TURN)
        tokenizer.check_end(turn, END_OF_TURN)
        opening = (IMAGE_START, *(f"<reserved{SIZES_FROM + n:05d}>" for n in self.units))
        return [tokenizer.id_of(BEGIN), *turn, *map(tokenizer.id_of, opening)]

    def check_prompt(self, ids: Sequence[int]) -> None:
        super().check_prompt(ids)
        ids = [int(i) for i in ids]
        if ids[-3:-2] != [self.image_start]:
            raise UserError(
                f"prompt ids end with {ids[-3:]}: a prompt of Lumina-mGPT has text, then image "
                f"start, height and width, here {list(self.opening)}"
            )
        if tuple(ids[-3:]) != self.opening:
            height, width = (i - self.size_zero for i in ids[-2:])
            raise UserError(
                f"prompt ids ask for an image of {height}x{width} units, the model draws "
                f"{self.units[0]}x{self.units[1]}: choose grid={height}x{width}, or other prompts"
            )
        image = {*self.token_ids, self.image_start}
        wrong = [i for i in ids[:-3] if i in image]
        if wrong or len(ids) == 3:
            found = f"have image tokens {wrong[:8]}" if wrong else "have no text"
            raise UserError(
                f"prompt ids {found} before image start, height and width: a prompt has text "
                f"there, and asks for one image"
            )

    def with_grid(self, grid: tuple[int, int]) -> "LuminaConfig":
        """The configuration for images of height x width units (32 pixels in released models)."""
        return self.shaped(units=tuple(grid))

    def with_template(
        self, aspect: float | str | None, size: str | None, cell: int = 16
    ) -> "LuminaConfig":
        """The configuration for images of HEIGHTxWIDTH pixels (`size`), as far as the model was
        trained on that shape; `UserError` that lists the shapes."""
        if aspect is None and size is None:
            return self
        return self.shaped(units=units_for(aspect, size, self.units, PATCH * cell))


def image_ids(names: Mapping[str, int]) -> tuple[int, ...]:
    """The id of every code, in the order of codes. names: {name: id}, of all tokens. Published
    vocabularies name the token of a code by its number: `IMGIMG`, a letter per digit (A is 0, J is
    9), and `Z`. The ids of these names are in no order. `UserError`: there are no codes, some are
    missing, or two names have one id or stand for one code."""
    if not isinstance(names, Mapping):
        raise UserError(f"{show(names)} given: names and ids are needed")
    found: dict[int, int] = {}
    for name, number in names.items():
        if match := IMAGE_TOKEN.fullmatch(name):
            code = int(match[1].translate(DIGITS))
            if type(number) is not int or number < 0 or code in found:
                raise UserError(f"{name} has the id {show(number)}: give one number for each code")
            found[code] = number
    missing = sorted(set(range(max(1, len(found)))) - found.keys())
    if missing or len(set(found.values())) < len(found):
        lacking = f"codes {some(map(str, missing), 8)} have no name IMGIMG...Z"
        raise UserError(f"{lacking if missing else 'some codes share an id'}: it is incomplete")
    return tuple(found[code] for code in range(len(found)))


def units_of(area: int) -> list[tuple[int, int]]:
    """(height, width) in units of all sizes for an area, at most `LONGEST` times as long as wide:
    of every width the tallest that fits, and those down to the tallest of the next. Training
    pictures were cropped to these."""
    found = [
        (height, width)
        for width in range(1, area + 1)
        for height in range(max(1, area // (width + 1)), area // width + 1)
    ]
    return sorted((h, w) for h, w in found if max(h, w) <= LONGEST * min(h, w))


def units_for(
    aspect: float | str | None, size: str | None, units: tuple[int, int], unit: int
) -> tuple[int, int]:
    """Height and width in units of a size in pixels, "768x512" or "512" for a square. `UserError`:
    `aspect` is given, or the size is none of the model's; the message lists these.

    units: those of the model as it is; their product is its area.
    unit: pixels of a side of one; 32 in released models.
    """
    if aspect is not None:
        raise UserError(f"aspect={show(aspect)}: Lumina-mGPT takes size=HEIGHTxWIDTH in pixels")
    known = units_of(units[0] * units[1])
    listed = some((f"{unit * h}x{unit * w}" for h, w in known), 60)
    found = re.fullmatch(r"([0-9]{1,6})(?:x([0-9]{1,6}))?", str(size))
    pixels = (int(found[1]), int(found[2] or found[1])) if found else (1, 1)
    wanted = pixels[0] // unit, pixels[1] // unit
    if pixels != (unit * wanted[0], unit * wanted[1]) or wanted not in known:
        raise UserError(f"size={show(size)}: HEIGHTxWIDTH in pixels is one of {listed}")
    return wanted


LARGE = {  # the 34B family's shape
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "swin_norm": True,
    "model_parallel_size": 4,
}
PRESETS = {f"lumina-mgpt-7b-{32 * n}": LuminaConfig(units=(n, n)) for n in (16, 24, 32)}
PRESETS["lumina-mgpt-34b-512"] = LuminaConfig(units=(16, 16), **LARGE)


class Lumina(Llama):
    """Parameters of the transformer and the steps of generation. The head gives logits of image
    tokens only, in the order of codes: others are never allowed within an image."""

    new_lines = True

    def __init__(self, config: LuminaConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.hidden_size
        self.token_embedding = table(config.text_vocab_size, width, rngs)
        self.blocks = stacked.stack(lambda r: LlamaBlock(config, rngs=r), config.depth, rngs)
        self.norm = nnx.Param(jnp.ones(width))
        self.head = linear(width, config.vocab_size, rngs)

    def encode_condition(self, condition, *, guided: bool) -> dict[str, Array]:
        """The unconditional rows know the size of the image only: image start, height and width.
        Their positions begin there."""
        ids, length = condition["ids"], condition["length"]
        if guided:
            opening = jnp.full_like(length, len(self.config.opening))
            ids, length = jnp.tile(ids, (2, 1)), jnp.concatenate([length, opening])
        return self.prompt_context(ids, length)

    def embed(self, context: dict, tokens: Int[Array, "B T"]) -> Float[Array, "R T D"]:
        """Embedded tokens, float32."""
        ids = jnp.asarray(np.array(self.config.token_ids, np.int32))
        embedded = self.token_embedding[ids[tokens]].astype(jnp.float32)
        return jnp.tile(embedded, (len(context["condition"]) // len(tokens), 1, 1))
