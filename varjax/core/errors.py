"""Errors that a user can cause, and helpers that put them into words.

Every message says what was given, what is allowed and what to do. Commands print it as one line and
exit with status 2.
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

LONGEST_MESSAGE = 20_000  # characters: messages quote files that others wrote


class UserError(ValueError):
    """The input is wrong. The error is raised before anything is compiled, allocated or written.
    There is one exception: a device turns out to have too little memory
    (`varjax.generation.program.OutOfMemory`). The middle of a very long message is left out."""

    def __init__(self, message: object = ""):
        text, half = str(message), LONGEST_MESSAGE // 2 - 50  # room for the notice
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
        super().__init__(text)


@contextlib.contextmanager
def about(what: object) -> Iterator[None]:
    """Puts `what`, such as a file, before the message of a `UserError` that is raised inside."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{what}: {error}") from error


def some(items: Iterable[str], most: int = 20, between: str = ", ") -> str:
    """Joins the first `most` of `items`, and says how many more there are."""
    items = list(items)
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return between.join([*items[:most], *more])


def show(value: object) -> str:
    """Shows any value in one short line of a message."""
    try:
        line = " ".join(repr(value).split())
    except ValueError:  # Python writes no whole numbers of more than 4,300 digits
        line = f"a {type(value).__name__} that is too long to show"
    return line if len(line) <= 60 else f"{line[:57]}..."


def nearest(given: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for a close match among `allowed`, else an empty string."""
    match = difflib.get_close_matches(given[:100], list(allowed), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def choose(what: str, given: object, allowed: Iterable[str]) -> str:
    """`given` if it is one of `allowed`; it may have any type. Else `UserError` with the list of
    allowed values and the nearest one."""
    allowed = list(allowed)
    if not isinstance(given, str) or given not in allowed:
        close = nearest(given, allowed) if isinstance(given, str) else ""
        raise UserError(f"unknown {what} {show(given)}: choose one of {', '.join(allowed)}{close}")
    return given
