"""Prompts that images are made of: conditions (`varjax.conditions.Condition`) that know the set of
prompts which they come from.

`Text` is for models that read features, which may still be missing. Planning, checks and reports
need the prompts only. So the encoder runs last, alone on the device, and its memory is free again
before the model is loaded. `TokenizedPrompts` is for models that read token ids.
"""

import hashlib
import json
import os
import pathlib
import sys
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from experiments.prompts.sets import PromptSet
from varjax.conditions import Condition
from varjax.core.errors import UserError
from varjax.models.model import Model
from varjax.storage import manifest
from varjax.storage.checkpoint import part_folder
from varjax.text import encoder as text_encoder
from varjax.text.features import TextFeatures
from varjax.text.prompt_ids import PromptIds


@dataclass(frozen=True, eq=False, kw_only=True)
class FromPrompts:
    """P prompts, `each` images of every prompt in turn."""

    prompts: PromptSet
    each: int

    def __len__(self) -> int:
        return len(self.prompts) * self.each

    @property
    def numbers(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.prompts), dtype=np.int32), self.each)

    @property
    def captions(self) -> list[str]:
        return [text for text in self.prompts.texts for _ in range(self.each)]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenizedPrompts(FromPrompts):
    """Prompts of a model that reads token ids.

    ids: of the prompts, for all images; None: not known, in a dry run without a tokenizer.
    """

    ids: PromptIds | None

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        return self.ids.take(index)

    def describe(self) -> dict:
        found = {"kind": self.prompts.kind, "images_per_prompt": self.each}
        return found | ({} if self.ids is None else {"ids": self.ids.describe()})

    def fitted(self, model: Model, slots: int | None) -> tuple[Model, Self]:
        """Return the model with `slots` places for token ids (None: as many as the longest prompt
        has), and these prompts in them. `UserError` if one does not fit."""
        if self.ids is None:
            return model, self
        model = model.with_prompt_tokens(slots or self.ids.longest)
        return model, replace(self, ids=self.ids.fitted(model.config, self.prompts.names))


@dataclass(frozen=True, eq=False, kw_only=True)
class Text(FromPrompts):
    """Prompts of a model that reads features.

    negative: texts that guidance leads away from: one for each prompt or one for all; None: the
      model's own unconditional text.
    encoder: folder of the text encoder; None with given features, or if it is not needed.
    assumed: tokens to plan with until there are features; None: the most.
    features: what the model sees, for all images; None: not encoded yet.
    peak_bytes: bytes that encoding took on the device; None: not encoded here.
    """

    text_maxlen: int
    negative: PromptSet | None = None
    encoder: pathlib.Path | None = None
    assumed: int | None = None
    features: TextFeatures | None = None
    peak_bytes: int | None = None

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        return self.features.take(index)

    @property
    def padded_length(self) -> int:
        """Tokens of a text in the program, or the most that there can be before encoding."""
        if self.features is None:
            return self.assumed or self.text_maxlen
        return self.features.padded_length

    def describe(self) -> dict:
        """Return what decides the images. It is the same before and after encoding."""
        found = {"kind": self.prompts.kind, "images_per_prompt": self.each}
        if self.encoder is None:
            return found | ({} if self.features is None else {"features": self.features.describe()})
        negative = [] if self.negative is None else self.negative.texts
        part = manifest.read_part(self.encoder, text_encoder.PART, text_encoder.TEXT_ENCODER)
        found |= {"prompts": len(self.prompts), "negative_prompts": len(negative)}
        hashed = {"sha256": [self.prompts.texts, negative], "encoder": part["files"]}
        for name, content in hashed.items():
            text = json.dumps(content, sort_keys=True)
            found[name] = hashlib.sha256(text.encode()).hexdigest()
        return found

    def spread(self, count: int) -> "Text":
        """Return at most `count` images, spread evenly over all prompts."""
        total = len(self.prompts)
        count = min(count, total)
        chosen = np.arange(count) * total // count

        def some(texts: PromptSet) -> PromptSet:
            return replace(texts, prompts=tuple(texts.prompts[i] for i in chosen))

        negative, features = self.negative, self.features
        if negative is not None and len(negative) == total:
            negative = some(negative)
        if features is not None:
            features = replace(features, numbers=features.numbers[:: self.each][chosen])
        return replace(
            self, prompts=some(self.prompts), each=1, negative=negative, features=features
        )


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def encoded(condition: Condition, model: Model, dtype: str) -> Condition:
    """Return the condition with its prompts encoded; labels are returned as they are. The encoder's
    memory is free again. `UserError` if it cannot be used, or is another model's."""
    if not isinstance(condition, Text) or condition.features is not None:
        return condition
    prompts, encoder, most = condition.prompts, condition.encoder, condition.text_maxlen
    print(f"encoding {len(prompts)} prompts with {encoder}", file=sys.stderr, flush=True)
    features, peak = text_encoder.encode_texts(
        encoder,
        prompts.texts,
        condition.negative and condition.negative.texts,
        dtype=dtype,
        max_length=most,
        names=prompts.names,  # of file and line, for messages
        negative_names=condition.negative and condition.negative.names,
        warn=warn,
    )
    fitted = features.fitted(model.config.text_channels, most).repeat(condition.each)
    return replace(condition, features=fitted, peak_bytes=peak)


def encoder_folder(checkpoint: str | os.PathLike, otherwise: str = "") -> pathlib.Path:
    """Return the folder of a checkpoint's encoder; `checkpoint` itself if it is an encoder alone.
    otherwise: what else a user can do if there is none, for the message."""
    folder = part_folder(checkpoint, text_encoder.PART)
    if not folder.exists():
        raise UserError(
            f"{checkpoint} has no text encoder: convert one with `python -m ported_weights ... "
            f"--text_encoder_source=DIR`{otherwise}"
        )
    return folder
