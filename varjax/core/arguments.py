"""Checks of arguments where they come in: the Python API, fields of policies, flags of commands.

Each check returns the value as Python has it. Otherwise it raises `UserError` with the name, what
was given and what is allowed. NumPy's numbers count as numbers. True and False do not, and 1.0 is
not a whole number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from varjax.core.errors import UserError, choose, show

LARGEST_FLOAT = 1.7976931348623157e308
LARGEST_INTEGER = 2**31 - 1  # of a field that says no range
LARGEST_BATCH = 10**6  # images per call of a program
T = TypeVar("T")


def wrong(name: str, value: object, rule: str) -> UserError:
    """The error that `name` was given `value` against a rule."""
    return UserError(f"{name}={show(value)}: {rule}")


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Checks a whole number from `low` to `high` (None: no limit)."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise wrong(name, value, "it must be a whole number")
    too_large = high is not None and value > high
    if too_large or (low is not None and value < low):
        raise wrong(name, value, f"at least {low}" if high is None else f"choose {low} to {high}")
    return int(value)


def real(name: str, value: object) -> float:
    """Checks a number, which may be infinite or NaN."""
    if isinstance(value, float) and not isinstance(value, np.generic):
        return value  # unchanged: a subclass may mean more (`policies.scale_rule.NotGiven`)
    if not isinstance(value, (int, np.integer, np.floating)) or isinstance(value, bool):
        raise wrong(name, value, "it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise wrong(name, value, "it must be a number below 1e308") from None


def number(
    name: str,
    value: object,
    low: float = -LARGEST_FLOAT,
    high: float = LARGEST_FLOAT,
    *,
    above: bool = False,
    note: str = "",
) -> float:
    """Checks a finite number from `low` to `high`; with `above` it must be greater than `low`.

    note: text that is appended to a message about the range.
    """
    found = real(name, value)
    if low <= found <= high and not (above and found == low):
        return found
    if (low, high) == (-LARGEST_FLOAT, LARGEST_FLOAT):
        raise UserError(f"{name}={found:g}: it must be a finite number")
    raise UserError(f"{name}={found:g} is outside {'(' if above else '['}{low:g}, {high:g}]{note}")


def flag(name: str, value: object) -> bool:
    """Checks a truth value."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong(name, value, "it must be true or false")
    return bool(value)


def text(name: str, value: object) -> str:
    """Checks a text that can be written to a file."""
    if not isinstance(value, str):
        raise wrong(name, value, "it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise wrong(
            name, value, f"character {error.start} is half of a surrogate pair, which is no text"
        ) from None
    return value


def instance(name: str, value: object, kind: type[T] | tuple[type[T], ...], words: str) -> T:
    """Checks that an object has a class, or one of several. words: what to give instead."""
    if not isinstance(value, kind):
        raise wrong(name, value, f"give {words}")
    return value


def dtype(name: str, value: object, allowed: Iterable[str]) -> str:
    """The name of a dtype, which may be given as NumPy or JAX write it."""
    try:
        # jnp.dtype alone would accept too much: None means float64 to NumPy, some texts name dtypes
        # that are not numbers, and a number or an array stands for its own dtype
        found = jnp.dtype(value).name if isinstance(value, (type, np.dtype)) else value
    except (TypeError, ValueError):
        found = value
    return choose(name, found, allowed)


def integers(name: str, values: object, words: str, most: int) -> np.ndarray:
    """Checks whole numbers [n], n up to `most`, in a sequence or an array.

    words: what to give instead. The result has the dtype object where 64 bits cannot hold them.
    """
    sequence = isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray))
    if not sequence and not (hasattr(values, "__array__") and hasattr(values, "__len__")):
        raise wrong(name, values, words)
    try:
        count = len(values)
    except (TypeError, OverflowError):  # an array without axes; a range longer than 2**63
        raise wrong(name, values, words) from None
    if count > most:
        raise UserError(f"{name} holds {count} numbers: at most {most}")
    if sequence and not isinstance(values, range):
        for i, value in enumerate(values):
            integer(f"{name}[{i}]", value)
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuO"):
        raise wrong(name, values, words)
    for i, value in enumerate(array if array.dtype == object else ()):
        integer(f"{name}[{i}]", value)
    return array


# --- fields of frozen dataclasses that are filled from outside ---

FIELD_CHECKS = {"int": integer, "int | None": integer, "float": number, "str": text, "bool": flag}


def within(default: T, low: float, high: float, **more: bool | str) -> T:
    """Declares a numeric field with a range from `low` to `high`. more: further arguments of
    `number`. Type checkers see the default in place of its declaration."""
    return field(default=default, metadata={"limits": {"low": low, "high": high} | more})


def field_types(cls: type) -> dict[str, str]:
    """{name: type} of the fields of a dataclass that a text can give; not of names as `_x`."""
    # an annotation is a type, several of them, or their text
    types = {f.name: f.type for f in fields(cls) if f.name[0] != "_"}
    kinds = {n: t.__name__ if isinstance(t, type) else str(t) for n, t in types.items()}
    return {n: kind for n, kind in kinds.items() if kind in FIELD_CHECKS}


def check_fields(given: object, limits: Mapping[str, Mapping[str, float | str]]) -> None:
    """Checks all such fields of a frozen dataclass, and their ranges: as declared (`within`), or
    else as `limits` says by name. Numbers become Python's."""
    whole = {"low": -LARGEST_INTEGER, "high": LARGEST_INTEGER}
    for name, kind in field_types(type(given)).items():
        declared, value = given.__dataclass_fields__[name].metadata, getattr(given, name)
        if value is None and kind.endswith("None"):
            continue
        usual = limits.get(name, whole if kind.startswith("int") else {})
        value = FIELD_CHECKS[kind](name, value, **declared.get("limits", usual))
        object.__setattr__(given, name, value)
