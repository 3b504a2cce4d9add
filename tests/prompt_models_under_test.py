"""Small models that read prompts as token ids: random weights, and tokenizers made here, whose
special tokens have the published names."""

import functools
import json
import re
from pathlib import Path

import pytest
from flax import nnx

from tests import models_under_test as models
from varjax.codecs.vq import ChameleonVQConfig, VQConfig
from varjax.models import registry
from varjax.models.janus import JanusConfig
from varjax.models.lumina import LuminaConfig
from varjax.storage import checkpoint
from varjax.storage.published import Configuration
from varjax.text import prompt_tokenizer

SMALL = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
    text_vocab_size=80,
)
# Ids of special tokens, and from 40 on of words: the same in both tokenizers where they share one.
JANUS_TOKENS = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜▁pad▁｜>": 7,
    "<|User|>": 10,
    "<|Assistant|>": 11,
    "<begin_of_image>": 12,
}
LUMINA_TOKENS = {
    "<s>": 0,
    "<racm3:break>": 30,
    "<reserved08799>": 31,
    "<reserved08801>": 33,
    "<reserved08802>": 34,
    "<reserved08803>": 35,
    "<reserved08706>": 39,
}
WORDS = "unk a red apple two green pears : . \n ␣ Generate an image of x according to the following"
WORDS = dict(zip(WORDS.split(" ") + ["prompt", "32x64", "64x32"], range(40, 80), strict=False))
JANUS = JanusConfig(**SMALL, vocab_size=20, head_hidden=24, pad_id=7, grid=(3, 2), prompt_tokens=20)
LUMINA = LuminaConfig(
    **SMALL,
    vocab_size=20,
    units=(2, 1),
    prompt_tokens=50,
    image_start=30,
    new_line=31,
    size_zero=32,
    first_image=4,
)
CODECS = {
    "janus": VQConfig(codebook_size=20, ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=8),
    "lumina": ChameleonVQConfig(
        n_embed=20, embed_dim=8, ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=8
    ),
}
CONFIGS: dict[str, Configuration] = {"janus": JANUS, "lumina": LUMINA}
TOKENS = {"janus": JANUS_TOKENS, "lumina": LUMINA_TOKENS}
# A prompt of each model, in ids of these tokenizers.
IDS = {"janus": [0, 10, 47, 41, 11, 47, 12], "lumina": [0, 41, 39, 30, 34, 33]}


def write_tokenizer(path: Path, special: dict[str, int], added=None) -> Path:
    """A tokenizer of `WORDS`, in which every space and every end of a line is a token. Like some
    published files it puts its first special token in front by itself, and pads.

    added: the special tokens that it knows as such; None: all."""
    tokenizers = pytest.importorskip(
        "tokenizers", reason="tokenizers is not installed (extra `text`)"
    )
    words = {" " if word == "␣" else word: number for word, number in WORDS.items()}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | special, unk_token="unk"))
    split = tokenizers.Regex(r"[\n :.]")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(split, "isolated")
    made.add_special_tokens(list(special if added is None else added))
    first = next(name for name in special if ":" not in name)  # the template's separator
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, special[first])]
    )
    made.enable_padding(length=64, pad_token=first)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))
    return path


def tokenizer(folder: Path, family: str) -> prompt_tokenizer.PromptTokenizer:
    path = write_tokenizer(folder / prompt_tokenizer.FILE, TOKENS[family])
    return prompt_tokenizer.PromptTokenizer(path)


def by_hand(text: str) -> list[int]:
    """Ids of a text without special tokens, word for word, as one would look them up."""
    pieces = [piece for piece in re.split(r"([\n :.])", text) if piece]
    return [WORDS["␣" if piece == " " else piece] for piece in pieces]


@functools.cache
def checkpoint_folder(family: str) -> Path:
    """A checkpoint with random weights and no tokenizer."""
    folder, found = models.MODELS / f"random-{family}", registry.family(family)
    if not folder.exists():
        configs = {"transformer": CONFIGS[family], "codec": CODECS[family]}
        parts = {n: p.module(configs[n], rngs=nnx.Rngs(0)) for n, p in found.tree.items()}
        sampling = dict(registry.JANUS_SAMPLING)
        checkpoint.save(folder, found, parts, metadata={"sampling": sampling}, overwrite=True)
    return folder


def with_tokenizer(family: str, folder: Path) -> Path:
    """A checkpoint in `folder` that has a tokenizer, too."""
    folder.mkdir()
    for file in checkpoint_folder(family).iterdir():
        (folder / file.name).symlink_to(file)
    place = folder / prompt_tokenizer.FOLDER / prompt_tokenizer.FILE
    assert json.loads(write_tokenizer(place, TOKENS[family]).read_text(encoding="utf-8"))
    return folder
