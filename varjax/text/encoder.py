"""The text encoder of a checkpoint: prompts to features.

    DIR/text_encoder.json   what the encoder is: format version, kind, configuration, sources, files
    DIR/params/             Orbax tree of the parameters
    DIR/spiece.model        the tokenizer, as published

In a checkpoint of a text-to-image model DIR is its folder `text_encoder`. Such a folder appears as
a whole or not at all, and is read after its description was checked.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from varjax.errors import UserError
from varjax.models import parameters
from varjax.storage import arrays as parameter_files
from varjax.storage import manifest
from varjax.storage.atomic import new_folder
from varjax.text import batches
from varjax.text.features import MAX_LENGTH, TextFeatures
from varjax.text.t5 import T5Config, T5Encoder
from varjax.text.tokenizer import FILE_NAME, Tokenizer, Tokens

FOLDER = "text_encoder"  # inside a checkpoint
NAME = "text_encoder.json"
FORMAT_VERSION = 1
KIND = "t5"
DTYPES = ("float32", "bfloat16")
_CONVERT = "convert flan-t5 with `python -m ported_weights --text_encoder_source=DIR ...`"


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class TextEncoder:
    """An encoder with its tokenizer. `metadata` is the content of `text_encoder.json`."""

    module: T5Encoder
    tokenizer: Tokenizer
    metadata: dict

    @classmethod
    def load(cls, directory, dtype=None) -> "TextEncoder":
        """Read an encoder onto the default device.

        Args:
          directory: its folder.
          dtype: float32 or bfloat16; None keeps the stored type.

        Raises:
          UserError: no encoder, another format version, missing tokenizer, damaged files.
          MissingExtra: without the `sentencepiece` package.
        """
        folder = Path(directory)
        content = read_description(folder)
        module = abstract(content)
        tokenizer = Tokenizer(folder / FILE_NAME, module.config.vocab_size)
        _check_files(folder, content)
        named = parameters.named(module)
        arrays = parameter_files.read(folder / "params", named, NAME, _checked_dtype(dtype))
        return cls(parameters.fill(module, arrays), tokenizer, content)

    def encode(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str] | None = None,
        *,
        max_length: int = MAX_LENGTH,
        batch_size: int = 8,
        names: Sequence[str] | None = None,
        negative_names: Sequence[str] | None = None,
        warn: Callable[[str], None] = _warn,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> TextFeatures:
        """Features of prompts. An empty one stands for the model's own unconditional text.

        Args:
          prompts: the texts.
          negative_prompts: one for each prompt or one for all; empty ones like None.
          max_length: tokens, the end token included; longer texts are cut, and `warn` is told.
          batch_size: texts per call of a program.
          names, negative_names: how messages call each text, such as "line 3 of prompts.txt".
          progress: called with the number of encoded texts and the total.

        Raises:
          UserError: no prompts, a number that makes no sense, some negative prompts empty.
        """
        _check_numbers(max_length, batch_size)
        if not len(prompts):
            raise UserError("there are no prompts: give at least one")
        prompts = [prompt.strip() for prompt in prompts]
        names = names or [f"prompt {i}" for i in range(len(prompts))]
        negatives = negative_texts(negative_prompts, len(prompts), negative_names)
        tokens = self._tokens(prompts, names, max_length, warn)
        tokens += self._tokens(*negatives, max_length, warn)
        features = batches.encode(self.module, [t and t.ids for t in tokens], batch_size, progress)
        kv, lens = _joined(features[: len(prompts)])
        negative_kv, negative_lens = _joined(features[len(prompts) :])
        return TextFeatures(
            kv=kv,
            lens=lens,
            negative_kv=negative_kv,
            negative_lens=negative_lens,
            unconditional=np.array([not prompt for prompt in prompts]),
            prompts=tuple(prompts),
            text_maxlen=max_length,
        )

    def _tokens(self, texts, names, max_length: int, warn) -> list[Tokens | None]:
        """Tokens of every text, None for an empty one."""
        found = [self.tokenizer.encode(text, max_length) if text else None for text in texts]
        for tokens, name in zip(found, names, strict=True):
            if tokens is not None and tokens.is_cut:
                warn(f"{name} has {tokens.full_length} tokens: cut to {max_length}")
        return found

    @property
    def width(self) -> int:
        """C of the features."""
        return self.module.config.d_model


def _check_numbers(max_length: int, batch_size: int) -> None:
    if not 1 <= max_length <= 2**15:
        raise UserError(f"max_length is {max_length}: choose 1 to {2**15} tokens")
    if not 1 <= batch_size <= 2**15:
        raise UserError(f"batch_size is {batch_size}: choose 1 to {2**15} texts")


def negative_texts(
    given: Sequence[str] | None, count: int, names: Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """Negative texts of `count` prompts, with their names; none where all are empty.

    Raises:
      UserError: another number of texts than 1 and `count`; some are empty and others are not.
    """
    texts = [text.strip() for text in given or ()]
    if not any(texts):
        return [], []
    names = list(names or [f"negative prompt {i}" for i in range(len(texts))])
    if len(texts) not in (1, count):
        raise UserError(
            f"{len(texts)} negative prompts for {count} prompts: give one for each, or one for all"
        )
    if "" in texts:
        raise UserError(
            f"{names[texts.index('')]} is empty and others are not: give every prompt a negative"
            " one, or none at all"
        )
    return texts, names


def _joined(features: Sequence[np.ndarray]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Rows one after the other, and their numbers; None for no texts."""
    if not features:
        return None, None
    return np.concatenate(features), np.array([len(f) for f in features], np.int32)


# --- the folder -----------------------------------------------------------------------------------


def abstract(content: Mapping) -> T5Encoder:
    """The module of a description, holding shapes and types only."""
    config = T5Config.from_published(content["config"])
    return parameters.abstract(lambda: T5Encoder(config, rngs=nnx.Rngs(0)))


def save(
    directory,
    encoder: T5Encoder,
    tokenizer,
    *,
    metadata: Mapping | None = None,
    dtype=None,
    overwrite: bool = False,
) -> None:
    """Write an encoder folder.

    Args:
      directory: the folder to create.
      encoder: its parameters, on the host or a device.
      tokenizer: path of the `spiece.model` to copy.
      metadata: further entries of `text_encoder.json`, as JSON has them. Computed ones win.
      dtype: storage type, float32 or bfloat16; by default as they are.
      overwrite: replace `directory` if it exists.

    Raises:
      UserError: `directory` exists or cannot be written; the tokenizer does not fit. Nothing is
        left behind.
    """
    Tokenizer(tokenizer, encoder.config.vocab_size)
    arrays = parameter_files.host_arrays(encoder, _checked_dtype(dtype))
    with new_folder(directory, overwrite=overwrite) as folder:
        parameter_files.write(folder / "params", arrays)
        shutil.copyfile(tokenizer, folder / FILE_NAME)
        content = {
            "format_version": FORMAT_VERSION,
            "kind": KIND,
            **(metadata or {}),
            "config": encoder.config.to_published(),
            "dtype": ", ".join(sorted({str(a.dtype) for a in arrays.values()})),
            "parameters": sum(int(a.size) for a in arrays.values()),
            "files": manifest.file_records(folder),
        }
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / NAME).write_text(text + "\n", encoding="utf-8")


def read_description(directory) -> dict:
    """Content of `text_encoder.json`, checked; no weights are read.

    Raises:
      UserError: missing, damaged, of another version or kind, an impossible configuration.
    """
    folder, file = Path(directory), Path(directory) / NAME
    if not file.is_file():
        what = "is no text encoder" if folder.is_dir() else "is not there"
        raise UserError(f"{folder} {what} (no {NAME}): {_CONVERT}")
    try:
        content = manifest.parse_json(file.read_text(encoding="utf-8"))
        entries = [content[name] for name in ("format_version", "kind", "config", "files")]
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {file} ({error!s:.200}): {_CONVERT}") from None
    if entries[0] != FORMAT_VERSION or entries[1] != KIND:
        raise UserError(
            f"{file} describes {entries[1]!r:.60} in format version {entries[0]!r:.60}, this varjax"
            f" reads {KIND!r} in version {FORMAT_VERSION}: {_CONVERT}"
        )
    try:
        T5Config.from_published(entries[2])
    except (UserError, TypeError, AttributeError) as error:
        raise UserError(f"{file}, entry 'config': {error}") from None
    return content


def check_folder(directory) -> T5Config:
    """The configuration of an encoder's folder, of which all but the weights is checked.

    Raises:
      UserError: as `read_description`; the tokenizer is missing, damaged or another encoder's.
      MissingExtra: without the `sentencepiece` package.
    """
    config = T5Config.from_published(read_description(directory)["config"])
    Tokenizer(Path(directory) / FILE_NAME, config.vocab_size)
    return config


def _check_files(folder: Path, content: Mapping) -> None:
    try:
        manifest.check_files(folder, content)
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / NAME}, entry 'files' is damaged: {_CONVERT}") from None


def _checked_dtype(dtype):
    """float32 or bfloat16: float16 overflows in T5's feed-forward."""
    if dtype is not None and jnp.dtype(parameter_files.floating_dtype(dtype)).name not in DTYPES:
        raise UserError(f"text encoder in {dtype}: choose {' or '.join(DTYPES)}")
    return dtype
