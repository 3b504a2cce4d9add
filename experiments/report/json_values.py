"""Declarations of what a value in a JSON file must be.

A declaration is a dict (these keys, perhaps others too), a list with one declaration (any number of
such entries), or a text: one of `TYPES`.
"""

import math
import reprlib
from collections.abc import Callable

from experiments.batch_files import Damaged
from varjax.arguments import LARGEST_BATCH

LARGEST_TEXT = 100_000  # characters
LARGEST_NUMBER = 2**63
Declaration = str | list["Declaration"] | dict[str, "Declaration"]


def _is_text(value: object) -> bool:
    """Return whether files can hold the text: Python and JSON also allow lone surrogates."""
    if not isinstance(value, str) or len(value) > LARGEST_TEXT:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _is_number(value: object) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and abs(value) < LARGEST_NUMBER and math.isfinite(value)


def _is_single(value: object) -> bool:
    return value is None or isinstance(value, bool) or _is_number(value) or _is_text(value)


def _is_single_or_list(value: object) -> bool:
    return all(map(_is_single, value)) if isinstance(value, list) else _is_single(value)


def _is_object(value: object, inside: Callable[[object], bool] = lambda v: True) -> bool:
    return isinstance(value, dict) and all(_is_text(k) and inside(v) for k, v in value.items())


TYPES: dict[str, Callable[[object], bool]] = {
    "text": _is_text,
    "text or null": lambda v: v is None or _is_text(v),
    "a number": _is_number,
    "a number of at least 0": lambda v: _is_number(v) and v >= 0,
    "a positive number": lambda v: _is_number(v) and v > 0,
    # `json_text.json_safe` writes these three texts for numbers that JSON lacks
    "a number or infinite": lambda v: _is_number(v) or v in ("inf", "-inf", "nan"),
    "a whole number": lambda v: _is_number(v) and isinstance(v, int),
    f"a whole number from 1 to {LARGEST_BATCH}": lambda v: (
        _is_number(v) and isinstance(v, int) and 1 <= v <= LARGEST_BATCH
    ),
    "seconds from 1e-9 to 1e9": lambda v: _is_number(v) and 1e-9 <= v <= 1e9,
    "a fraction in (0, 1] or null": lambda v: v is None or (_is_number(v) and 0 < v <= 1),
    "done, skipped or infeasible": lambda v: v in ("done", "skipped", "infeasible"),
    "a list": lambda v: isinstance(v, list),
    "an object": lambda v: isinstance(v, dict),
    "an object of texts": lambda v: _is_object(v, _is_text),
    "an object of single values or lists": lambda v: _is_object(v, _is_single_or_list),
}


def check(value: object, declared: Declaration, place: str = "") -> None:
    """Raise `Damaged` unless a value is as declared. place: where it stands, for the message."""
    wanted = {dict: "an object", list: "a list"}.get(type(declared), declared)
    if not TYPES[wanted](value):
        raise Damaged(f"{place} is {reprlib.repr(value)}, it must be {wanted}")
    if isinstance(declared, dict):
        for key, part in declared.items():
            inner = f"{place}.{key}" if place else key
            if key not in value:
                raise Damaged(f"{inner} is missing")
            check(value[key], part, inner)
    elif isinstance(declared, list):
        for i, item in enumerate(value):
            check(item, declared[0], f"{place}[{i}]")
