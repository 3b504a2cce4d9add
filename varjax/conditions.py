"""What images are made of: labels or text, one entry per image.

Labels are here, text is `varjax.text.features.TextFeatures`. `resolve` makes one from what a caller
of the Python API gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from varjax import arguments
from varjax.errors import UserError, show
from varjax.model import Model, default_dtype
from varjax.text.encoder import encode_texts
from varjax.text.features import TextFeatures

MOST_IMAGES = 10**7
MOST_NAMED = 10  # wrong labels that a message names
LABELS_WANTED = "give a list of class numbers, one for each image"


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
        """Checked: `UserError` for what is no list of whole numbers, and naming every label
        outside the classes."""
        given = arguments.integers("labels", labels, LABELS_WANTED, MOST_IMAGES)
        if given.size == 0:
            raise UserError("no labels given: name at least one class")
        wrong = np.unique(given[(given < 0) | (given >= num_classes)]).tolist()
        if wrong:
            more = "" if len(wrong) <= MOST_NAMED else f" and {len(wrong) - MOST_NAMED} more"
            raise UserError(
                f"labels {', '.join(map(show, wrong[:MOST_NAMED]))}{more} are outside the model's "
                f"{num_classes} classes: choose 0 to {num_classes - 1}"
            )
        return cls(given.astype(np.int32), names)

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

KINDS = {"labels": ("labels",), "text": ("prompts", "text_features")}  # by `Model.condition`


def check(model: Model, labels=None, prompts=None, text_features=None) -> int:
    """How many images are asked for; `UserError` unless exactly what the model's images are made of
    is given."""
    given = {"labels": labels, "prompts": prompts, "text_features": text_features}
    named = [name for name, value in given.items() if value is not None]
    wanted = KINDS[model.condition]
    if len(named) != 1 or named[0] not in wanted:
        raise UserError(
            f"{', '.join(named) or 'nothing'} given: {model.name} ({model.family.name}) draws from "
            f"{' or '.join(wanted)}: give exactly that"
        )
    if labels is not None:
        return len(Labels.of(labels, model.num_classes))
    if prompts is not None:
        return len(arguments.texts("prompts", prompts, "give a list of texts, one for each image"))
    words = "TextFeatures, as varjax.text.features.load reads"
    return len(arguments.instance("text_features", text_features, TextFeatures, words))


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
