"""A small encoder with the arrays of the original, and a small tokenizer."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from varjax.models import parameters
from varjax.text import encoder as encoder_lib
from varjax.text.encoder import TextEncoder
from varjax.text.t5 import T5Config, T5Encoder

SENTENCES = (
    "a photo of a red apple on a wooden table",
    "two green pears beside a blue cup, oil painting",
    "a photo of three dogs and a cat below an old clock",
    "the sun rises over a quiet lake; mist among tall trees",
    "an astronaut rides a horse through the desert at night",
    "portrait of a woman with a yellow hat, soft light",
)


@dataclass(frozen=True)
class Tiny:
    """The folder of the published arrays, and their configuration."""

    folder: Path
    config: T5Config
    arrays: dict


@pytest.fixture(scope="session")
def tiny(fixtures_dir) -> Tiny:
    folder = fixtures_dir / "t5"
    published = json.loads((folder / "t5_tiny_config.json").read_text())
    with np.load(folder / "t5_tiny_io.npz") as archive:
        return Tiny(folder, T5Config.from_published(published), dict(archive))


@pytest.fixture(scope="session")
def spiece(tmp_path_factory) -> Path:
    """A SentencePiece model with T5's special ids and fewer than 128 pieces."""
    sentencepiece = pytest.importorskip(
        "sentencepiece", reason="sentencepiece is not installed (extra `text`)"
    )
    prefix = tmp_path_factory.mktemp("spiece") / "spiece"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(prefix),
        vocab_size=100,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="session")
def random_encoder(tiny) -> T5Encoder:
    """The small encoder with random weights; norms are near 1."""
    module = parameters.abstract(lambda: T5Encoder(tiny.config, rngs=nnx.Rngs(0)))
    rng, arrays = np.random.default_rng(0), {}
    for name, leaf in parameters.named(module).items():
        draw = rng.normal(size=leaf.shape) * (1 if name == "embedding" else 0.1)
        arrays[name] = jnp.asarray(draw + name.endswith("norm"), jnp.float32)
    return parameters.fill(module, arrays)


@pytest.fixture(scope="session")
def folder(random_encoder, spiece, tmp_path_factory) -> Path:
    """An encoder folder as a checkpoint has it."""
    path = tmp_path_factory.mktemp("encoder") / "text_encoder"
    encoder_lib.save(path, random_encoder, spiece, metadata={"sources": []})
    return path


@pytest.fixture(scope="session")
def text_encoder(folder) -> TextEncoder:
    return TextEncoder.load(folder)
