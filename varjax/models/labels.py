"""Class labels, one per image, by number or name: what class-conditional models draw from."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from varjax.conditions import MOST_IMAGES, ConditionKind, Model
from varjax.core import arguments
from varjax.core.errors import UserError, show, some

MOST_NAMED = 10  # wrong labels that a message names
LABELS_WANTED = "give a list of class numbers or names, one for each image"


@dataclass(frozen=True, eq=False)
class Labels:
    """A `Condition` of class numbers. numbers: int32 [N]; names: of all classes, or None."""

    numbers: np.ndarray
    names: Sequence[str] | None = None

    @classmethod
    def of(
        cls, labels: Sequence[int | str], num_classes: int, names: Sequence[str] | None = None
    ) -> "Labels":
        """Checked labels. `UserError` for anything but a list of whole numbers and names of
        classes, and naming every label outside the classes."""
        numbers = _numbered(labels, names or ())
        given = arguments.integers("labels", numbers, LABELS_WANTED, MOST_IMAGES)
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


def _numbered(labels: object, names: Sequence[str]) -> object:
    """Labels with numbers for texts. Whatever is no list of labels stays as it is."""
    if not isinstance(labels, (list, tuple)) or not any(isinstance(one, str) for one in labels):
        return labels
    known: dict[str, set[int]] = {}
    for number, name in enumerate(names):
        for synonym in (name, *name.split(",")):  # ImageNet: "tench, Tinca tinca"
            known.setdefault(_plain(synonym), set()).add(number)
    return [_number(one, known) if isinstance(one, str) else one for one in labels]


def _plain(name: str) -> str:
    """A name without differences in case and spaces."""
    return " ".join(name.casefold().split())


def _number(label: str, known: Mapping[str, set[int]]) -> int:
    """The class that a name means, or a number as text. `UserError` for no class, or several."""
    plain = _plain(label)
    found = sorted(known.get(plain, ()))
    if len(found) > 1:
        numbers = some(map(str, found), MOST_NAMED)
        raise UserError(f"{show(label)} is the name of classes {numbers}: give a number")
    if found or re.fullmatch(r"-?\d{1,40}", plain):
        return found[0] if found else int(plain)
    near = [name for name in known if plain and plain in name]
    near = near or get_close_matches(plain[:100], known, 3, 0.5)
    hint = f"; did you mean {some(map(repr, near), 5)}?" if near else ""
    what = "one of the names, or a number" if known else "a number, the model has no names"
    raise UserError(f"no class is called {show(label)}: give {what}{hint}")


class LabelKind(ConditionKind):
    """The `ConditionKind` of class labels."""

    name = "labels"
    arguments = ("labels",)

    def count(self, model: Model, *, labels: Sequence[int | str]) -> int:
        return len(self.resolve(model, labels=labels))

    def resolve(self, model: Model, *, labels: Sequence[int | str]) -> Labels:
        return Labels.of(labels, model.config.num_classes, model.class_names)


LABELS = LabelKind()
