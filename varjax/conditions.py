"""Conditions, which images are drawn from: one per image.

A kind of condition belongs to the families that take it: class labels are `varjax.models.labels`,
texts are `varjax.text.encoder`, prompts as token ids are `varjax.text.prompt_ids`. Each kind
brings its checks, its arguments of the Python API and its file format. This module holds what the
kinds have in common, and `check`, `fitted` and `resolve`, which ask the kind that a model takes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from varjax.core.errors import UserError

MOST_IMAGES = 10**7
Model = Any  # `varjax.models.model.Model`, which imports this module
JSON = Mapping | list | str | int  # what describes a condition in a report


class Condition(Protocol):
    """The condition of every image of a run; its length is their number.

    numbers: int32 [N], of every image its label, or the number of its prompt.
    captions: texts for people, one per image; None: there are none.
    """

    numbers: np.ndarray
    captions: Sequence[str] | None

    def __len__(self) -> int: ...

    def take(self, index: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        """The argument of `Transformer.encode_condition` for some images: arrays with a leading
        axis over images, whose shapes do not depend on which images are taken."""

    def describe(self) -> JSON:
        """All that decides the images, for JSON."""


class ConditionKind:
    """A kind of condition, as a family of models takes it.

    name: as configurations have it (`config.condition`).
    arguments: names of the Python API's arguments that give such a condition; one of them is given.
    count(model, **given), resolve(model, **given): the number of images that an argument asks for,
      and the `Condition` that it gives. `UserError` if it is not usable.
    """

    name: str
    arguments: tuple[str, ...]

    def fitted(self, model: Model, **given) -> Model:
        """The model as it has to be for an argument. `UserError` if there is no such model."""
        return model


def check(model: Model, **given) -> int:
    """The number of images that are asked for. given: arguments of the Python API by name, None
    where the caller gave none; `UserError` unless they are exactly what the model draws from."""
    return _asked("count", model, given)


def resolve(model: Model, **given) -> Condition:
    """The condition of the images. given: as in `check`, which raises the same errors. Prompts are
    encoded by the text encoder of the model's checkpoint: `UserError` if there is none."""
    return _asked("resolve", model, given)


def fitted(model: Model, **given) -> Model:
    """The model as it has to be for these images: prompts of token ids decide how many places it
    has for them. given: as in `check`, which raises the same errors."""
    return _asked("fitted", model, given)


def _asked(what: str, model: Model, given: Mapping):
    """The answer of the model's kind of condition."""
    kind = model.family.conditions[model.config.condition]
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1 or not named.keys() <= set(kind.arguments):
        raise UserError(
            f"{', '.join(named) or 'nothing'} given: {model.name} ({model.family.name}) draws from "
            f"{' or '.join(kind.arguments)}: give exactly that"
        )
    return getattr(kind, what)(model, **named)
