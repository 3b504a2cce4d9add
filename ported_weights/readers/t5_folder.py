"""Folders of T5 as Hugging Face publishes them (flan-t5): `config.json`, `spiece.model`, and the
weights in any of their containers."""

import dataclasses
import json
from pathlib import Path

from ported_weights.readers import sources
from ported_weights.tables.t5 import SIGNATURE
from varjax.errors import UserError, about
from varjax.storage.manifest import read_json
from varjax.text.t5 import SPIECE_FILE, T5Config, Tokenizer

CONFIG = "config.json"
# Where the weights are, best first: folders are published with several containers side by side.
WEIGHTS = (
    *("model.safetensors.index.json", "model.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)


def open_folder(path) -> tuple[T5Config, sources.Source]:
    """The configuration and the weights, which are not read yet; the tokenizer is checked.
    `UserError` for a missing or unusable file, `MissingExtra` without `sentencepiece`."""
    folder = Path(path)
    config = _config(folder)
    Tokenizer(folder / SPIECE_FILE, config.vocab_size)
    found = sources.open_source(_weights(folder), SIGNATURE)
    files = (folder / CONFIG, folder / SPIECE_FILE, *found.files)
    return config, dataclasses.replace(found, files=files)


def _config(folder: Path) -> T5Config:
    if not folder.is_dir():
        raise UserError(
            f"{folder} is no folder: give that of a published T5 encoder, with {CONFIG},"
            f" {SPIECE_FILE} and weights"
        )
    file = folder / CONFIG
    if not file.exists():
        raise UserError(f"{folder} has no {CONFIG}: take the one published with flan-t5")
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold names and values, as published with flan-t5")
    with about(file):
        return T5Config.from_published(content)


def _weights(folder: Path) -> Path:
    """The weights to read: the first container that is there with all of its shards."""
    found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    return next(filter(_is_whole, found), found[0] if found else folder)


def _is_whole(path: Path) -> bool:
    if not path.name.endswith(".index.json"):
        return True
    try:
        shards = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        return all((path.parent / name).is_file() for name in shards)
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # the reader of the index says what is wrong with it
