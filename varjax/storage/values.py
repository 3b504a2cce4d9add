"""Checks of values that files, commands and users bring: texts, paths, arrays, pairs of a name and
a value; and packages that may be missing. They raise what `varjax.core.arguments` raises."""

import importlib
import os
import re
from types import ModuleType

import numpy as np

from varjax.core.arguments import instance, text, wrong
from varjax.core.errors import UserError, show

LONGEST_PATH = 4096  # bytes, as on Linux, with the end of the text
LONGEST_NAME = 255  # bytes of a file's or folder's own name


def texts(name: str, values: object, words: str) -> tuple[str, ...]:
    """Checks a list or tuple of at least one text. words: what to give instead."""
    given = values if isinstance(values, (list, tuple)) else ()
    if not given or not all(isinstance(value, str) for value in given):
        raise wrong(name, values, words)
    return tuple(text(f"{name}[{i}]", value) for i, value in enumerate(values))


def path(name: str, value: object) -> str | os.PathLike:
    """Checks the path of a file or folder: a text or a `pathlib.Path`."""
    instance(name, value, (str, os.PathLike), "a path")
    plain = os.fspath(value)
    if not isinstance(plain, str) or not plain or "\0" in plain:
        raise wrong(name, value, "it is no path: give the name of a file or folder")
    try:
        encoded = os.fsencode(plain)
    except UnicodeEncodeError as error:
        raise wrong(name, value, f"no name of a file holds character {error.start}") from None
    if len(encoded) >= LONGEST_PATH:
        raise wrong(name, value, f"a path has less than {LONGEST_PATH} bytes")
    if max(map(len, encoded.split(os.sep.encode()))) > LONGEST_NAME:
        raise wrong(name, value, f"names of files and folders have up to {LONGEST_NAME} bytes")
    return value


def as_array(name: str, values: object) -> np.ndarray:
    """The values as an array of any dtype."""
    if isinstance(values, range):  # it may be longer than memory
        raise wrong(name, values, "give an array")
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{name} is no regular array of numbers: {error}") from None


def measured(name: str, values: object, largest: float) -> np.ndarray:
    """Checks an array of measured numbers, which lie between 0 and `largest`."""
    array = as_array(name, values)
    wrong_kind = array.dtype.kind not in "iuf"
    found = np.zeros(0) if wrong_kind else array.astype(np.float64, copy=False)
    for is_wrong, what in (
        (wrong_kind, f"{str(array.dtype):.20} where numbers are needed"),
        (not np.isfinite(found).all(), "values that are not finite numbers"),
        (found.min(initial=0) < 0, "negative numbers"),
        (found.max(initial=0) > largest, f"numbers above {largest:g}"),
    ):
        if is_wrong:
            raise UserError(f"{name} holds {what}")
    return array


def parse_pairs(given: str) -> dict[str, str]:
    """Reads `"window=16,path=a,b.npz"` into `{"window": "16", "path": "a,b.npz"}`.

    Only a comma before `key=` separates two entries, so a value may hold commas and "=". Values
    stay texts; the caller knows the type of each key. `UserError` for an entry without `key=value`,
    an empty value, or a key given twice.
    """
    text("key=value,key=value", given)
    pairs = {}
    for entry in re.split(r",(?=\s*\w+\s*=)", given) if given.strip() else []:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not (key.isidentifier() and equals and value) or value.endswith(","):
            where = f"{show(entry.strip())} of {show(given)}"
            raise UserError(f"cannot read {where}: write key=value,key=value")
        if key in pairs:
            raise UserError(f"{key} is given twice in {show(given)}: keep one of them")
        pairs[key] = value
    return pairs


class MissingExtra(UserError):
    """An optional package is not installed; the message holds the pip command."""


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Imports `module`, which comes with the optional dependencies `extra` of pyproject.toml.
    `MissingExtra` names the package, what it is needed for (`purpose`) and the pip command."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is there, but something that it needs is not
        raise MissingExtra(
            f"{purpose} needs the package {module.split('.')[0]}, which is not installed: "
            f"run `pip install -e '.[{extra}]'` in the folder of varjax, or "
            f"`pip install 'FILE.whl[{extra}]'` with its wheel"
        ) from None
