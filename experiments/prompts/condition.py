"""Prompts that images are made of, before and after they are encoded.

A `varjax.conditions.Condition` whose features may still be missing: planning, checks and reports
need the prompts only, so that the encoder runs last, alone on the device, and is freed again.
"""

import hashlib
import json
import os
import pathlib
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.prompts.sets import PromptSet
from varjax.errors import UserError
from varjax.model import Model
from varjax.storage import manifest
from varjax.storage.checkpoint import part_folder
from varjax.text import encoder as text_encoder
from varjax.text.features import TextFeatures


@dataclass(frozen=True, eq=False, kw_only=True)
class Text:
    """P prompts, `each` images of every prompt in turn.

    negative: texts that guidance leads away from: one for each prompt or one for all; None: the
      model's own unconditional text.
    encoder: folder of the encoder for what has no features yet; None: it can only be planned for.
    assumed: tokens to plan with as long as there are no features; None: the most.
    features: what the model sees, of all images.
    peak_bytes: what encoding took on the device; None: not encoded here.
    """

    prompts: PromptSet
    each: int
    text_maxlen: int
    negative: PromptSet | None = None
    encoder: pathlib.Path | None = None
    assumed: int | None = None
    features: TextFeatures | None = None
    peak_bytes: int | None = None

    def __len__(self) -> int:
        return len(self.prompts) * self.each

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        return self.features.take(index)

    @property
    def numbers(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.prompts), dtype=np.int32), self.each)

    @property
    def captions(self) -> list[str]:
        return [text for text in self.prompts.texts for _ in range(self.each)]

    @property
    def padded_length(self) -> int:
        """Tokens of a text as the program will have them, or the most that they can be."""
        if self.features is None:
            return self.assumed or self.text_maxlen
        return self.features.padded_length

    def describe(self) -> dict:
        """What decides the images, the same before and after encoding."""
        found = {"kind": self.prompts.kind, "images_per_prompt": self.each}
        if self.encoder is None:
            return found | ({} if self.features is None else {"features": self.features.describe()})
        negative = [] if self.negative is None else self.negative.texts
        files = manifest.read_part(self.encoder, text_encoder.PART, text_encoder.TEXT_ENCODER)[
            "files"
        ]
        return found | {
            "prompts": len(self.prompts),
            "negative_prompts": len(negative),
            "sha256": _digest([self.prompts.texts, negative]),
            "encoder": _digest(files),
        }

    def spread(self, count: int) -> "Text":
        """At most `count` images, over all prompts evenly."""
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


# --- encoding -------------------------------------------------------------------------------------


def encoded(condition: Any, model: Model, dtype: str) -> Any:
    """The condition with its prompts encoded; the encoder is freed before this returns. Labels are
    returned unchanged. `UserError` if the encoder cannot be used, or is not this model's."""
    if not isinstance(condition, Text) or condition.features is not None:
        return condition
    prompts, encoder, most = condition.prompts, condition.encoder, condition.text_maxlen
    print(f"encoding {len(prompts)} prompts with {encoder}", file=sys.stderr, flush=True)
    options = {"dtype": dtype, "max_length": most}
    features, peak = encode(encoder, prompts, condition.negative, **options)
    fitted = features.fitted(model.config.text_channels, most).repeat(condition.each)
    return replace(condition, features=fitted, peak_bytes=peak)


def encode(
    encoder: pathlib.Path, prompts: PromptSet, negative: PromptSet | None, **options
) -> tuple[TextFeatures, int | None]:
    """`text_encoder.encode_texts`, whose messages then name file and line."""
    if negative is not None:
        options |= {"negative": negative.texts, "negative_names": negative.names}
    return text_encoder.encode_texts(encoder, prompts.texts, names=prompts.names, **options)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def encoder_folder(checkpoint: str | os.PathLike, otherwise: str = "") -> pathlib.Path:
    """Where the encoder of a checkpoint is, or `checkpoint` itself if it is an encoder alone.
    otherwise: what else a user can do if there is none."""
    folder = part_folder(checkpoint, text_encoder.PART)
    if not folder.exists():
        raise UserError(
            f"{checkpoint} has no text encoder: convert one with `python -m ported_weights ... "
            f"--text_encoder_source=DIR`{otherwise}"
        )
    return folder


def check_text_tokens(asked: int | None, model: Model) -> int | None:
    """Padded length of texts that --text_tokens names, if the model takes it."""
    most = getattr(model.config, "text_maxlen", None)
    if asked is not None and most is None:
        raise UserError(f"--text_tokens={asked}: {model.name} takes no text, leave it out")
    if asked is not None and asked > most:
        raise UserError(f"--text_tokens={asked}: {model.name} takes at most {most}")
    return asked


def text_tokens(condition: Any) -> int | None:
    """Padded length of the texts of a condition, for predictions; None for labels."""
    return condition.padded_length if isinstance(condition, Text) else None
