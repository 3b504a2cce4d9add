"""A small text encoder for tests: random weights, and a tokenizer trained on a few sentences."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from varjax.storage import checkpoint, parameters
from varjax.text.encoder import TEXT_ENCODER
from varjax.text.t5 import SPIECE_FILE, T5Config, T5Encoder

SENTENCES = (
    "a photo of a red apple on a wooden table",
    "two green pears beside a blue cup, oil painting",
    "a photo of three dogs and a cat below an old clock",
    "the sun rises over a quiet lake; mist among tall trees",
    "an astronaut rides a horse through the desert at night",
    "portrait of a woman with a yellow hat, soft light",
)
T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
CONFIG = T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)


def write_tokenizer(path: Path, **ids) -> Path:
    """A SentencePiece model of fewer than 128 pieces at `path`, which ends in .model; skips the
    test without the package. ids: special ones, by default those of T5."""
    sentencepiece = pytest.importorskip(
        "sentencepiece", reason="sentencepiece is not installed (extra `text`)"
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(path.with_suffix("")),
        vocab_size=100,
        hard_vocab_limit=False,
        minloglevel=2,
        **(ids or T5_IDS),
    )
    path.with_suffix(".vocab").unlink()
    return path


def random_encoder(config: T5Config = CONFIG) -> T5Encoder:
    """An encoder with random weights of sizes that trained ones have; norms are near 1."""
    module = parameters.abstract(T5Encoder, config)
    rng, arrays = np.random.default_rng(0), {}
    for name, leaf in parameters.named(module).items():
        draw = rng.normal(size=leaf.shape) * (1 if name == "embedding" else 0.1)
        arrays[name] = jnp.asarray(draw + name.endswith("norm"), jnp.float32)
    return parameters.fill(module, arrays)


def save(directory: Path, encoder: T5Encoder, tokenizer: Path) -> None:
    parts, files = {"text_encoder": encoder}, {"text_encoder": {SPIECE_FILE: tokenizer}}
    checkpoint.save(directory, TEXT_ENCODER, parts, files=files)


def write_folder(directory: Path, config: T5Config = CONFIG) -> Path:
    """An encoder folder, such as CHECKPOINT/text_encoder."""
    tokenizer = directory.with_name("tokenizer.model")
    write_tokenizer(tokenizer)
    save(directory, random_encoder(config), tokenizer)
    tokenizer.unlink()
    return directory
