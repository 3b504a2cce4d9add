"""What a value of a JSON file must be, declared: a dict: these keys and perhaps others; a list: any
number of such entries; a text: one of `KINDS`."""

import math
import reprlib
from typing import Any

from experiments.batch_files import Damaged

LARGEST_TEXT = 100_000  # characters
LARGEST_NUMBER = 2**63


def _is_text(value) -> bool:
    """Lone surrogates are text to Python and JSON, but no file can hold them."""
    if not isinstance(value, str) or len(value) > LARGEST_TEXT:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _is_number(value) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and abs(value) < LARGEST_NUMBER and math.isfinite(value)


def _is_single(value) -> bool:
    return value is None or isinstance(value, bool) or _is_number(value) or _is_text(value)


def _is_single_or_list(value) -> bool:
    return all(map(_is_single, value)) if isinstance(value, list) else _is_single(value)


def _is_object(value, inside=lambda v: True) -> bool:
    return isinstance(value, dict) and all(_is_text(k) and inside(v) for k, v in value.items())


KINDS = {
    "text": _is_text,
    "text or null": lambda v: v is None or _is_text(v),
    "a number": _is_number,
    "a number of at least 0": lambda v: _is_number(v) and v >= 0,
    "a positive number": lambda v: _is_number(v) and v > 0,
    # also what JSON lacks, as `json_text.json_safe` writes it
    "a number or infinite": lambda v: _is_number(v) or v in ("inf", "-inf", "nan"),
    "a whole number": lambda v: _is_number(v) and isinstance(v, int),
    "a fraction in (0, 1] or null": lambda v: v is None or (_is_number(v) and 0 < v <= 1),
    "done, skipped or infeasible": lambda v: v in ("done", "skipped", "infeasible"),
    "a list": lambda v: isinstance(v, list),
    "an object": lambda v: isinstance(v, dict),
    "an object of texts": lambda v: _is_object(v, _is_text),
    "an object of single values or lists": lambda v: _is_object(v, _is_single_or_list),
}


def check(value: Any, spec: Any, place: str = "") -> None:
    """Raise `Damaged` if `value` is not as `spec` says; `place` is where it stands."""
    kind = {dict: "an object", list: "a list"}.get(type(spec), spec)
    if not KINDS[kind](value):
        raise Damaged(f"{place} is {reprlib.repr(value)}, it must be {kind}")
    if isinstance(spec, dict):
        for key, part in spec.items():
            inner = f"{place}.{key}" if place else key
            if key not in value:
                raise Damaged(f"{inner} is missing")
            check(value[key], part, inner)
    elif isinstance(spec, list):
        for i, item in enumerate(value):
            check(item, spec[0], f"{place}[{i}]")
