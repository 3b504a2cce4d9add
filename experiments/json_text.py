"""Results as JSON text."""

import json
import math
from typing import TypeAlias

import numpy as np

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


def json_text(content: object) -> str:
    """The text of a JSON file for people and programs (`json_safe`)."""
    return json.dumps(json_safe(content), indent=1, ensure_ascii=False) + "\n"


def json_safe(value: object) -> Json:
    """Turns a value into plain JSON data, through dicts, lists and tuples.

    Arrays and scalars of NumPy and JAX become Python's. Numbers that JSON lacks become "inf",
    "-inf" and "nan", which `float(text)` reads back.
    """
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and JAX, scalars included
        return json_safe(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
