"""Class labels, one per image: what class-conditional models draw from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varjax.conditions import MOST_IMAGES, ConditionKind, Model
from varjax.core import arguments
from varjax.core.errors import UserError, show, some

MOST_NAMED = 10  # wrong labels that a message names
LABELS_WANTED = "give a list of class numbers, one for each image"


@dataclass(frozen=True, eq=False)
class Labels:
    """A `Condition` of class numbers. numbers: int32 [N]; names: of all classes, or None."""

    numbers: np.ndarray
    names: Sequence[str] | None = None

    @classmethod
    def of(
        cls, labels: Sequence[int], num_classes: int, names: Sequence[str] | None = None
    ) -> "Labels":
        """Checked labels. `UserError` for anything but a list of whole numbers, and naming every
        label outside the classes."""
        given = arguments.integers("labels", labels, LABELS_WANTED, MOST_IMAGES)
        if given.size == 0:
            raise UserError("no labels given: name at least one class")
        if wrong := np.unique(given[(given < 0) | (given >= num_classes)]).tolist():
            raise UserError(
                f"labels {some(map(show, wrong), MOST_NAMED)} are outside the model's "
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


class LabelKind(ConditionKind):
    """The `ConditionKind` of class labels."""

    name = "labels"
    arguments = ("labels",)

    def count(self, model: Model, *, labels: Sequence[int]) -> int:
        return len(self.resolve(model, labels=labels))

    def resolve(self, model: Model, *, labels: Sequence[int]) -> Labels:
        return Labels.of(labels, model.config.num_classes, model.class_names)


LABELS = LabelKind()
