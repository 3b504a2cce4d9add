"""Results as JSON."""

import json
import math
from typing import Any

import numpy as np


def json_text(content: Any) -> str:
    """The text of a JSON file for people and programs, numpy and infinite numbers included."""
    return json.dumps(json_safe(content), indent=1, ensure_ascii=False) + "\n"


def json_safe(value: Any) -> Any:
    """`value` as plain JSON data: numpy to Python, and "inf", "-inf", "nan" for what JSON lacks.

    `float(text)` reads these back. Goes through dicts, lists and tuples.
    """
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and jax, scalars included
        return json_safe(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
