"""What a picture shall show: from the words of a request to a model's condition.

Class-conditional models take a class by its number or name. The others take a prompt, which their
text encoder or tokenizer reads; both stay in memory. Every condition has the same shapes, so that
images of any requests share a program.
"""

import threading
from difflib import get_close_matches
from typing import Protocol

import numpy as np
from jaxtyping import PyTree

from varjax import arguments
from varjax.errors import UserError, show
from varjax.model import Model
from varjax.models.labels import Labels
from varjax.text import prompt_ids
from varjax.text.encoder import TextEncoder
from varjax.text.prompt_tokenizer import PromptTokenizer

MOST_CHARACTERS = 4000  # of a prompt
MOST_SHOWN = 200  # of a wrong one, in a message


class Subjects(Protocol):
    """How a model's conditions are found. names: of all classes; None: prompts are free."""

    names: list[str] | None

    def of(self, prompt: str | None, label: int | None) -> PyTree:
        """Arrays of one image, leading axis 1. `UserError` for what the model cannot draw."""
        ...


def subjects(model: Model) -> Subjects:
    """Return how the conditions of a model are found. `UserError` if it reads prompts and its
    checkpoint has no text encoder, or no tokenizer."""
    kinds = {"labels": Classes, "text": Texts, "prompt_ids": TokenIds}
    return kinds[model.condition](model)


class Classes:
    """Classes, by number, name, or a prompt that is one of both."""

    def __init__(self, model: Model):
        count = model.num_classes
        self.count = count
        self.names = list(model.class_names or map(str, range(count)))
        self._numbers = {name.casefold(): i for i, name in enumerate(self.names)}

    def of(self, prompt: str | None, label: int | None) -> np.ndarray:
        if (prompt is None) == (label is None):
            raise UserError("give either prompt (the name of a class) or class (its number)")
        return Labels.of([self.label(prompt) if label is None else label], self.count).numbers

    def label(self, prompt: str) -> int:
        """The class of a prompt."""
        words = " ".join(checked_prompt(prompt).casefold().split())
        if words in self._numbers:
            return self._numbers[words]
        if words.isdecimal() and len(words) < 10:
            return int(words)
        close = get_close_matches(words[:MOST_SHOWN], self._numbers, 3, 0.5)
        hint = f"; near it are {', '.join(map(repr, close))}" if close else ""
        raise UserError(
            f"there is no class {prompt[:MOST_SHOWN]!r}: give the name of one of {self.count} "
            f"classes, or its number{hint}"
        )


class Texts:
    """Prompts that a text encoder reads."""

    names = None

    def __init__(self, model: Model):
        self._config, self._lock = model.config, threading.Lock()
        self._encoder = TextEncoder.load(model.directory, model.dtype.name)

    def of(self, prompt: str | None, label: int | None) -> dict[str, np.ndarray]:
        most = self._config.text_maxlen
        prompt = _only_prompt(prompt, label)
        with self._lock:  # it compiles programs by length
            found = self._encoder.encode([prompt], max_length=most, warn=lambda line: None)
        arrays = found.fitted(self._config.text_channels, most).take([0])
        longer = most - arrays["kv"].shape[1]
        return arrays | {"kv": np.pad(arrays["kv"], ((0, 0), (0, longer), (0, 0)))}


class TokenIds:
    """Prompts that a tokenizer reads."""

    names = None

    def __init__(self, model: Model):
        self._config = model.config
        self._tokenizer = PromptTokenizer.of_checkpoint(model.directory, model.name)

    def of(self, prompt: str | None, label: int | None) -> dict[str, np.ndarray]:
        prompt = _only_prompt(prompt, label)
        found = prompt_ids.encode([prompt], self._config, self._tokenizer)
        return found.fitted(self._config).take([0])


def _only_prompt(prompt: str | None, label: int | None) -> str:
    if label is not None or prompt is None:
        raise UserError("this model draws from text: give prompt")
    return checked_prompt(prompt)


def checked_prompt(prompt: str) -> str:
    """Return a prompt. `UserError` if it is no text, empty or very long."""
    if not isinstance(prompt, str):
        raise UserError(f"prompt={show(prompt)}: it must be a text")
    if len(prompt) > MOST_CHARACTERS:
        raise UserError(f"prompt has {len(prompt)} characters: at most {MOST_CHARACTERS}")
    return arguments.text("prompt", prompt)
