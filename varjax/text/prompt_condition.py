"""Base of features of texts and of prompts as token ids: the images of a set of prompts, and
warnings about prompts of which a tokenizer knows no word: all of them give the same picture.

Letters: P prompts, N images, B images of a batch.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
from jaxtyping import Int

from varjax.conditions import MOST_IMAGES
from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.storage import npz, values
from varjax.storage.atomic import new_file

Tell = Callable[[str], None]


def warn(message: str) -> None:
    """Warns as a library does. Commands print the message to standard error instead."""
    warnings.warn(message, stacklevel=3)


def is_known(
    ids: Sequence[int], unknown: int | None, decode: Callable[[Sequence[int]], str]
) -> bool:
    """Whether none of these ids is the unknown token, or the others hold a letter or digit.

    unknown: the id of that token; None: the tokenizer has none, since it reads every byte.
    """
    known = [i for i in ids if i != unknown]
    return len(known) == len(ids) or any(map(str.isalnum, decode(known)))


def no_known_word(name: str, text: str) -> str:
    """The message about such a prompt. name: how messages call it."""
    return (
        f"{name} ({text!r:.60}) has no word that the model's tokenizer knows: it gives the picture"
        " of any such prompt; write it in the language and script that the model was trained on"
    )


def read_arrays(
    what: str, path: str | os.PathLike, needed: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """The arrays of an npz file of prompts, with `prompts` as a tuple of texts. `UserError` if
    there is no such file, it is damaged, or one that is needed is missing."""
    if not os.path.exists(values.path(what, path)):
        raise UserError(f"there is no file {path}")
    arrays = npz.load(path, (*needed, *optional))
    if missing := [name for name in needed if name not in arrays]:
        raise UserError(
            f"{what} {path}: {' and '.join(missing)} missing; needed are {' and '.join(needed)}"
        )
    if "prompts" in arrays:
        arrays["prompts"] = tuple(map(str, arrays["prompts"].reshape(-1)))
    return arrays


class PromptCondition:
    """Base of conditions that are P prompts for N images.

    lens: tokens of each prompt [P]. prompts: the texts, where known. numbers: the prompt of every
    image [N]; by default one image per prompt.
    """

    lens: Int[np.ndarray, " P"]
    prompts: tuple[str, ...] | None
    numbers: Int[np.ndarray, " N"] | None

    def _array(self, name: str, axes: int, kind: type, needed: str) -> np.ndarray:
        """A field as an array of so many axes and of this kind of numbers."""
        array = values.as_array(name, getattr(self, name))
        if array.ndim != axes or not array.size or not np.issubdtype(array.dtype, kind):
            given = f"shape {array.shape} and type {array.dtype}"
            raise UserError(f"{name} has {given}: give {needed}")
        return array

    def _check_lens(self, name: str, rows_name: str) -> None:
        """Checks lengths of prompts, whose rows lie one after the other in another field."""
        lens = self._array(name, 1, np.integer, "a whole number per prompt")
        if (short := np.flatnonzero(lens < 1)).size:
            raise UserError(
                f"{name}[{short[0]}] is {lens[short[0]]}: a prompt has at least 1 token"
            )
        rows = len(getattr(self, rows_name))
        if int(lens.astype(object).sum()) != rows:
            raise UserError(f"{name} sums up to {lens.sum()}, {rows_name} has {rows} rows")
        object.__setattr__(self, name, lens.astype(np.int32))

    def _check_images(self) -> None:
        """Checks `prompts` and `numbers` against `lens`, and gives them their types."""
        count = len(self.lens)
        if self.prompts is not None:
            texts = values.texts("prompts", self.prompts, "give a text for every prompt")
            object.__setattr__(self, "prompts", texts)
            if len(texts) != count:
                raise UserError(f"prompts has {len(texts)} texts for {count} entries of lens")
        numbers = range(count) if self.numbers is None else self.numbers
        words = f"give numbers of prompts, from 0 to {count - 1}, one for each image"
        found = arguments.integers("numbers", numbers, words, MOST_IMAGES)
        if not found.size or (found < 0).any() or (found >= count).any():
            raise arguments.wrong("numbers", numbers, words)
        object.__setattr__(self, "numbers", found.astype(np.int32))

    def __len__(self) -> int:
        """The number of images."""
        return len(self.numbers)

    def repeat(self, count: int) -> Self:
        """`count` images in place of every image, one behind the other."""
        arguments.integer("images per prompt", count, 1, MOST_IMAGES)
        return replace(self, numbers=np.repeat(self.numbers, count))

    @property
    def captions(self) -> list[str] | None:
        """The prompt of every image, where known."""
        return None if self.prompts is None else [self.prompts[i] for i in self.numbers]

    def _described(self, kind: str, **counts: int) -> dict:
        """A report's entry about the prompts; equal for equal arrays and images."""
        digest = hashlib.sha256()
        for array in (*self._arrays().values(), self.numbers):
            digest.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
        return {
            "kind": kind,
            "images": len(self),
            "prompts": len(self.lens),
            "tokens": int(self.lens.sum()),
            "longest": self.longest,
            **counts,
            "sha256": digest.hexdigest(),
        }

    def save(self, path: str | os.PathLike) -> None:
        """Writes the arrays of the prompts (not how often each is repeated) as npz."""
        texts = {} if self.prompts is None else {"prompts": np.array(self.prompts, dtype=str)}
        with new_file(path) as file:
            np.savez(file, **self._arrays() | texts)
