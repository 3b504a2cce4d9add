"""Prompts of which a tokenizer knows no word: all of them give the same picture."""

import warnings
from collections.abc import Callable, Sequence

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


def message(name: str, text: str) -> str:
    """The message about such a prompt. name: how messages call it."""
    return (
        f"{name} ({text!r:.60}) has no word that the model's tokenizer knows: it gives the picture"
        " of any such prompt; write it in the language and script that the model was trained on"
    )
