"""The text encoder of a checkpoint: prompts to features, with few compiled programs.

Texts are sorted by length and padded to the next of a few sizes. Every size is one program; the
last batch of a size is filled up. Padding is dropped from the results.
"""

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from varjax.conditions import ConditionKind, Model
from varjax.core.arguments import instance, integer
from varjax.core.errors import UserError
from varjax.storage import arrays, checkpoint
from varjax.storage.families import Catalogue, Part
from varjax.storage.parameters import default_dtype, peak_bytes
from varjax.storage.values import path, texts
from varjax.text.features import MAX_LENGTH, TextFeatures
from varjax.text.prompt_condition import Tell, no_known_word, warn
from varjax.text.t5 import END, SPIECE_FILE, T5Config, T5Encoder, Tokenizer

PART = "text_encoder"  # its name in a family, and its folder in a checkpoint
TEXT_ENCODER = Part("T5", T5Config, T5Encoder, own_folder=True)
CATALOGUE = Catalogue(parts={PART: TEXT_ENCODER})
DTYPES = ("float32", "bfloat16")  # float16 overflows in T5's feed-forward
FEATURES_WANTED = "TextFeatures, as varjax.text.features.load reads"
SMALLEST = 16  # tokens of the smallest program; further sizes are powers of two


def encode_texts(
    directory: str | os.PathLike,
    prompts: Sequence[str],
    negative: Sequence[str] | None = None,
    *,
    dtype: str | None,
    batch_size: int = 8,
    **options,
) -> tuple[TextFeatures, int | None]:
    """Features of texts, and the bytes that this took on the device (None: all texts are empty).

    The encoder is on the device only while this runs. `directory` and `dtype` are arguments of
    `TextEncoder.load`, the others of `TextEncoder.encode`, with the errors of both.
    """
    encoder = TextEncoder.load(directory, dtype)
    features = encoder.encode(prompts, negative, batch_size=batch_size, **options)
    texts, peak = int((~features.unconditional).sum()), None
    texts += 0 if features.negative_lens is None else len(features.negative_lens)
    if texts:  # JAX keeps what it compiled for these shapes: nothing is compiled a second time
        ids, lengths = _padded([], min(batch_size, texts), padded_size(features.longest))
        peak = peak_bytes(_program.lower(encoder.module, ids, lengths).compile())
    del encoder
    gc.collect()  # modules refer to themselves, and their arrays should go now
    return features, peak


@dataclass(frozen=True)
class TextEncoder:
    """An encoder with its tokenizer."""

    module: T5Encoder
    tokenizer: Tokenizer

    @classmethod
    def load(cls, directory: str | os.PathLike, dtype: str | None = None) -> "TextEncoder":
        """Reads an encoder onto the default device, from its own folder or from a checkpoint that
        has one. dtype: "float32" or "bfloat16"; None: the type in which it is stored. Errors are
        those of `check_folder`, and `UserError` for another type or damaged weights."""
        if dtype is not None and arrays.floating_dtype(dtype).name not in DTYPES:
            raise UserError(f"text encoder in {dtype}: choose {' or '.join(DTYPES)}")
        _, tokenizer = check_folder(path("text encoder", directory))
        parts, _ = checkpoint.load(directory, CATALOGUE, {PART: dtype})
        return cls(parts[PART], tokenizer)

    def encode(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str] | None = None,
        *,
        max_length: int = MAX_LENGTH,
        batch_size: int = 8,
        names: Sequence[str] | None = None,
        negative_names: Sequence[str] | None = None,
        warn: Tell = warn,
        progress: Callable[[int, int], None] | None = None,
    ) -> TextFeatures:
        """Features of prompts. An empty one stands for the model's own unconditional text.

        Args:
          prompts: the texts.
          negative_prompts: one for each prompt or one for all; if all are empty, there are none.
          max_length: tokens, the end token included; longer texts are cut.
          warn: is told of texts that are cut, and of texts without a word that is known.
          batch_size: texts per call of a program.
          names, negative_names: how messages call each text, such as "line 3 of prompts.txt".
          progress: called with the number of encoded texts and the total.

        Raises:
          UserError: no prompts, a number that makes no sense, some negative prompts empty.
        """
        for name, value in (("max_length", max_length), ("batch_size", batch_size)):
            integer(name, value, 1, 2**15)
        given = texts("prompts", prompts, "give a list of at least one text")
        prompts = [prompt.strip() for prompt in given]
        names = names or [f"prompt {i}" for i in range(len(prompts))]
        negatives, negative_names = negative_texts(negative_prompts, len(prompts), negative_names)
        ids = self._ids(prompts, names, max_length, warn)
        ids += self._ids(negatives, negative_names, max_length, warn)
        features = encode_ids(self.module, ids, batch_size, progress)
        lens = np.array([len(f) for f in features], np.int32)
        negative = {}
        if negatives:
            negative["negative_kv"] = np.concatenate(features[len(prompts) :])
            negative["negative_lens"] = lens[len(prompts) :]
        return TextFeatures(
            kv=np.concatenate(features[: len(prompts)]),
            lens=lens[: len(prompts)],
            **negative,
            unconditional=np.array([not prompt for prompt in prompts]),
            prompts=tuple(prompts),
            text_maxlen=max_length,
        )

    def _ids(self, texts, names, max_length: int, tell) -> list[list[int] | None]:
        """Token ids of every text, None for an empty one."""
        found = []
        for text, name in zip(texts, names, strict=True):
            ids = self.tokenizer.ids(text) if text else None
            if ids is not None and len(ids) > max_length:
                tell(f"{name} has {len(ids)} tokens: cut to {max_length}")
                ids = [*ids[: max_length - 1], END]
            if ids is not None and not self.tokenizer.knows(ids):
                tell(no_known_word(name, text))
            found.append(ids)
        return found


def negative_texts(
    given: Sequence[str] | None, count: int, names: Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """Negative texts of `count` prompts, and their names. If all are empty, there are none.

    Raises:
      UserError: neither 1 nor `count` texts are given; some are empty and others are not.
    """
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return [], []
    given = texts("negative_prompts", given, "give a list of texts")
    found = [text.strip() for text in given]
    names = list(names or [f"negative prompt {i}" for i in range(len(found))])
    if not any(found):
        return [], []
    if len(found) not in (1, count):
        raise UserError(
            f"{len(found)} negative prompts for {count} prompts: give one for each, or one for all"
        )
    if "" in found:
        raise UserError(f"{names[found.index('')]} is empty and others are not: give all or none")
    return found, names


def check_folder(directory: str | os.PathLike) -> tuple[T5Config, Tokenizer]:
    """The configuration and the tokenizer of an encoder: everything in its folder but the weights.

    Raises:
      UserError: there is no encoder, or an unusable one; the tokenizer is missing, damaged or
        belongs to another encoder.
      MissingExtra: without the `sentencepiece` package.
    """
    config = checkpoint.describe(directory, CATALOGUE, [PART])[0][PART].config
    file = checkpoint.part_folder(directory, PART) / SPIECE_FILE
    return config, Tokenizer(file, config.vocab_size)


# --- programs -------------------------------------------------------------------------------------


def padded_size(length: int) -> int:
    """The size that a text of `length` tokens is padded to."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


def encode_ids(
    module: T5Encoder,
    texts: Sequence[Sequence[int] | None],
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Float[np.ndarray, "length D"]]:
    """Float32 features of every text, given its token ids; one row of zeros for an empty text,
    which is None."""
    width = module.config.d_model
    found: list[np.ndarray] = [np.zeros((1, width), np.float32) for _ in texts]
    given = [i for i, ids in enumerate(texts) if ids is not None]
    rows, done = min(batch_size, len(given)), 0
    by_size: dict[int, list[int]] = {}
    for i in given:
        by_size.setdefault(padded_size(len(texts[i])), []).append(i)
    batches = (
        (size, members[start : start + rows])  # shortest first
        for size, members in sorted(by_size.items())
        for start in range(0, len(members), rows)
    )
    for size, indices in batches:
        ids, lengths = _padded([texts[i] for i in indices], rows, size)
        features = np.asarray(_program(module, ids, lengths))
        for i, row, length in zip(indices, features, lengths, strict=False):
            found[i] = row[:length].copy()  # the rest of the batch can go
        done += len(indices)
        if progress is not None:
            progress(done, len(given))
    return found


def _padded(texts: Sequence[Sequence[int]], rows: int, size: int):
    """int32 ids [rows, size] and lengths [rows]. A row without a text has one token of padding."""
    ids, lengths = np.zeros((rows, size), np.int32), np.ones(rows, np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)], lengths[row] = text, len(text)
    return ids, lengths


@jax.jit
def _program(
    module: T5Encoder, ids: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> Float[Array, "B T D"]:
    return module(ids, lengths)


# --- what models ask ---------------------------------------------------------------------------


class TextKind(ConditionKind):
    """The `ConditionKind` of texts. Exactly one of the two arguments is given."""

    name = "text"
    arguments = ("prompts", "text_features")

    def count(self, model: Model, *, prompts=None, text_features=None) -> int:
        if prompts is not None:
            return len(texts("prompts", prompts, "give a list of texts, one for each image"))
        found = instance("text_features", text_features, TextFeatures, FEATURES_WANTED)
        return len(found)

    def resolve(
        self,
        model: Model,
        *,
        prompts: Sequence[str] | None = None,
        text_features: TextFeatures | None = None,
    ) -> TextFeatures:
        """Features that fit the model. The text encoder is on the device only while this runs.
        `UserError` also if there is no encoder, or it is another model's."""
        self.count(model, prompts=prompts, text_features=text_features)
        config = model.config
        if prompts is not None:
            text_features, _ = encode_texts(
                model.directory or "", prompts, dtype=default_dtype(), max_length=config.text_maxlen
            )
        return text_features.fitted(config.text_channels, config.text_maxlen)


TEXT = TextKind()
