"""What images are made of: labels or text, one entry per image.

A condition has

    len(condition)            images
    condition.take(index)     arrays of some images, leading axis images; shapes do not depend on
                              which images they are
    condition.describe()      JSON-able content: what decides the images
    condition.numbers         int32 [N]: labels, or the numbers of the prompts
    condition.captions        texts for people, or None

Labels are here, text is `varjax.text.features.TextFeatures`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from varjax.errors import UserError


class Condition(Protocol):
    """See above."""

    def __len__(self) -> int: ...

    def take(self, index: np.ndarray) -> Any: ...

    def describe(self) -> Any: ...

    @property
    def numbers(self) -> np.ndarray: ...

    @property
    def captions(self) -> Sequence[str] | None: ...


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
