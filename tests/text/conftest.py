"""A small encoder and its tokenizer."""

from pathlib import Path

import pytest

from tests import text_encoder_under_test as small
from varjax.text.encoder import TextEncoder
from varjax.text.t5 import T5Encoder


@pytest.fixture(scope="session")
def spiece(tmp_path_factory) -> Path:
    """A SentencePiece model with T5's special ids and fewer than 128 pieces."""
    return small.write_tokenizer(tmp_path_factory.mktemp("spiece") / "spiece.model")


@pytest.fixture(scope="session")
def random_encoder() -> T5Encoder:
    return small.random_encoder()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """An encoder folder as a checkpoint has it."""
    return small.write_folder(tmp_path_factory.mktemp("encoder") / "text_encoder")


@pytest.fixture(scope="session")
def text_encoder(folder) -> TextEncoder:
    return TextEncoder.load(folder)
