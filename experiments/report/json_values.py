"""Declarations of what a value in a JSON file must be.

A declaration is a dict (these keys, perhaps others too), a list with one declaration (any number of
such entries), or a text: one of `TYPES`.
"""

import reprlib
from collections.abc import Callable

from experiments.batch_files import Damaged
from varjax.arguments import LARGEST_BATCH

LARGEST_NUMBER = 2**63
Declaration = str | list["Declaration"] | dict[str, "Declaration"]


def _is_number(value: object, low: float = -LARGEST_NUMBER, high: float = LARGEST_NUMBER) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and low <= value <= high  # which NaN is not


def _is_object(value: object, of: type = object) -> bool:
    return isinstance(value, dict) and all(isinstance(v, of) for v in value.values())


TYPES: dict[str, Callable[[object], bool]] = {
    "text": lambda v: isinstance(v, str),
    "text or null": lambda v: v is None or isinstance(v, str),
    "a number of at least 0": lambda v: _is_number(v, 0),
    "a positive number": lambda v: _is_number(v, 0) and v > 0,
    # `json_text.json_safe` writes these three texts for numbers that JSON lacks
    "a number or infinite": lambda v: _is_number(v) or v in ("inf", "-inf", "nan"),
    "a whole number": lambda v: _is_number(v) and isinstance(v, int),
    f"a whole number from 1 to {LARGEST_BATCH}": lambda v: (
        _is_number(v, 1, LARGEST_BATCH) and isinstance(v, int)
    ),
    "seconds from 1e-9 to 1e9": lambda v: _is_number(v, 1e-9, 1e9),
    "a fraction in (0, 1] or null": lambda v: v is None or (_is_number(v, 0, 1) and v > 0),
    "done, skipped or infeasible": lambda v: v in ("done", "skipped", "infeasible"),
    "a list": lambda v: isinstance(v, list),
    "an object": _is_object,
    "an object of texts": lambda v: _is_object(v, str),
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
