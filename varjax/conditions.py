"""What images are made of: labels or text, one entry per image.

Labels are here, text is `varjax.text.features.TextFeatures`. `resolve` makes one from what a caller
of the Python API gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from varjax.errors import UserError
from varjax.model import Model, default_dtype
from varjax.text.encoder import encode_texts
from varjax.text.features import TextFeatures


class Condition(Protocol):
    """What the images of a run are made of; its length is their number."""

    numbers: np.ndarray  # int32 [N]: labels, or the numbers of the prompts
    captions: Sequence[str] | None  # texts for people

    def __len__(self) -> int: ...

    def take(self, index: np.ndarray) -> Any:
        """Arrays of some images, leading axis images; their shapes do not depend on which."""

    def describe(self) -> Any:
        """What decides the images, for JSON."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Class numbers. numbers: int32 [N]; names: of all classes, or None."""

    numbers: np.ndarray
    names: Sequence[str] | None = None

    @classmethod
    def of(
        cls, labels: Sequence[int], num_classes: int, names: Sequence[str] | None = None
    ) -> "Labels":
        """Checked: `UserError` naming every label outside the classes."""
        wrong = sorted({int(x) for x in labels if not 0 <= int(x) < num_classes})
        if wrong:
            raise UserError(
                f"labels {', '.join(map(str, wrong))} are outside the model's {num_classes} "
                f"classes: choose 0 to {num_classes - 1}"
            )
        if len(labels) == 0:
            raise UserError("no labels given: name at least one class")
        return cls(np.asarray(labels, np.int32), names)

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, index: np.ndarray) -> np.ndarray:
        return self.numbers[index]

    def describe(self) -> list[int]:
        return self.numbers.tolist()

    @property
    def captions(self) -> list[str] | None:
        return None if self.names is None else [self.names[i] for i in self.numbers]


# --- what the Python API takes --------------------------------------------------------------------

KINDS = {"labels": ("labels",), "text": ("prompts", "text_features")}  # by `Family.condition`


def check(model: Model, labels=None, prompts=None, text_features=None) -> int:
    """How many images are asked for; `UserError` unless exactly what the model's images are made of
    is given."""
    given = {"labels": labels, "prompts": prompts, "text_features": text_features}
    named = [name for name, value in given.items() if value is not None]
    wanted = KINDS[model.family.condition]
    if len(named) != 1 or named[0] not in wanted:
        raise UserError(
            f"{', '.join(named) or 'nothing'} given: {model.name} ({model.family.name}) draws from "
            f"{' or '.join(wanted)}: give exactly that"
        )
    if labels is not None and (isinstance(labels, str) or not hasattr(labels, "__len__")):
        raise UserError(f"labels={labels!r:.60}: give a list of class numbers, one for each image")
    if prompts is not None:
        texts = isinstance(prompts, (list, tuple)) and all(isinstance(p, str) for p in prompts)
        if not texts or not prompts:
            raise UserError(f"prompts={prompts!r:.60}: give a list of texts, one for each image")
    if text_features is not None and not isinstance(text_features, TextFeatures):
        raise UserError(
            f"text_features={text_features!r:.60}: give TextFeatures, as "
            f"varjax.text.features.load reads"
        )
    if labels is not None:
        Labels.of(labels, model.num_classes)
    return len(given[named[0]])


def resolve(model: Model, labels=None, prompts=None, text_features=None) -> Condition:
    """The condition of the images; prompts are encoded by the text encoder of the model's
    checkpoint, which is on the device only while this runs.

    Raises:
      UserError: as `check`; no text encoder, or another model's.
    """
    check(model, labels, prompts, text_features)
    if labels is not None:
        return Labels.of(labels, model.num_classes, model.class_names)
    config = model.config
    if prompts is not None:
        folder, longest = model.directory or "", config.text_maxlen
        text_features, _ = encode_texts(folder, prompts, dtype=default_dtype(), max_length=longest)
    return text_features.fitted(config.text_channels, config.text_maxlen)
