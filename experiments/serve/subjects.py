"""Subjects of pictures: from the words of one image to a model's condition.

Class-conditional models take a class by its number or name. The others take a prompt, which their
text encoder or tokenizer reads; both stay in memory. Every condition has the same shapes, so that
images of any requests share a program.
"""

import threading

import numpy as np
from jaxtyping import PyTree

from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.models.labels import Labels
from varjax.models.model import Model
from varjax.text import prompt_ids
from varjax.text.encoder import TextEncoder
from varjax.text.prompt_tokenizer import PromptTokenizer

MOST_CHARACTERS = 4000  # of a prompt
EXAMPLES = ["a red apple on a white table", "a lighthouse at night", "a fox in the snow"]


class Subjects:
    """The way from words to a model's conditions. names: of all classes; None: prompts are free.
    examples: prompts to begin with. Subclasses have `of`, or `_read(prompt)`, its arrays."""

    names: list[str] | None = None
    examples: list[str] = EXAMPLES

    def of(self, prompt: str | None, label: int | None) -> PyTree:
        """Arrays of one image, leading axis 1. `UserError` for what the model cannot draw."""
        if label is not None or prompt is None:
            raise UserError("this model draws from text: give prompt")
        return self._read(arguments.text("prompt", prompt))


def subjects(model: Model) -> Subjects:
    """Returns how the conditions of a model are found. `UserError` if it reads prompts and its
    checkpoint has no text encoder, or no tokenizer."""
    kinds = {"labels": Classes, "text": Texts, "prompt_ids": TokenIds}
    return kinds[model.condition](model)


class Classes(Subjects):
    """Classes, by number, name, or a prompt that is one of both."""

    def __init__(self, model: Model):
        self._named, self._count, self.examples = model.class_names, model.num_classes, []
        self.names = list(self._named or map(str, range(self._count)))

    def of(self, prompt: str | None, label: int | None) -> np.ndarray:
        if (prompt is None) == (label is None):
            raise UserError("give either prompt (the name of a class) or class (its number)")
        given = arguments.text("prompt", prompt) if label is None else label
        return Labels.of([given], self._count, self._named).numbers


class Texts(Subjects):
    """Prompts that a text encoder reads."""

    def __init__(self, model: Model):
        self._config, self._lock = model.config, threading.Lock()
        self._encoder = TextEncoder.load(model.directory, model.dtype.name)

    def _read(self, prompt: str) -> dict[str, np.ndarray]:
        most = self._config.text_maxlen
        with self._lock:  # it compiles programs by length
            found = self._encoder.encode([prompt], max_length=most, warn=lambda line: None)
        arrays = found.fitted(self._config.text_channels, most).take([0])
        longer = most - arrays["kv"].shape[1]
        return arrays | {"kv": np.pad(arrays["kv"], ((0, 0), (0, longer), (0, 0)))}


class TokenIds(Subjects):
    """Prompts that a tokenizer reads."""

    def __init__(self, model: Model):
        self._config = model.config
        self._tokenizer = PromptTokenizer.of_checkpoint(model.directory, model.name)

    def _read(self, prompt: str) -> dict[str, np.ndarray]:
        quiet = {"warn": lambda line: None}
        found = prompt_ids.encode([prompt], self._config, self._tokenizer, **quiet)
        return found.fitted(self._config).take([0])
