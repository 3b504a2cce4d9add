"""The checker of the import hook in conftest.py: jaxtyping annotations, and nothing else.

Kinds of number, ranks and equal letters of one signature are checked at every call of a function
and at every construction of a dataclass. Other annotations (protocols, `int` for what may be a
NumPy integer) are for readers.
"""

import functools
import inspect
import pathlib
import sys
from typing import Any, get_args

import jax
from beartype import beartype
from jaxtyping import AbstractArray

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("varjax", "pallas_kernels", "ported_weights", "experiments")
JAX = str(pathlib.Path(jax.__file__).parent)


def annotated_modules() -> list[str]:
    """Names of our modules that use jaxtyping. The hook slows down every function of a module, so
    the planners' inner loops stay outside."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    used = [file for file in files if "jaxtyping" in file.read_text(encoding="utf-8")]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in used]


def check(function):
    """Type checker for `jaxtyping.install_import_hook`, which calls it twice for every function of
    ours with an empty one that has its parameters and annotations: to check arguments (it returns
    anything), and to check arguments and result."""
    hints = {name: hint for name, hint in function.__annotations__.items() if of_arrays(hint)}
    if not hints:
        return function
    before = function.__annotations__.get("return") is Any
    function.__annotations__ = hints
    if function.__name__ != "__init__":
        return beartype(function)
    return function if before else _constructed(function)


def of_arrays(hint) -> bool:
    """Whether a jaxtyping annotation is part of an annotation."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(of_arrays, get_args(hint)))


def _constructed(init):
    """Checks the fields of a dataclass when it is made: what `__post_init__` has refused or turned
    into arrays is no concern. jax rebuilds registered dataclasses of anything (shapes without data,
    shardings, None, objects of its own); only those of our code are checked."""
    names = [name for name in inspect.signature(init).parameters if name != "self"]
    checked = beartype(init)

    @functools.wraps(init)
    def check_fields(self, *_, **given):
        if not _made_by_jax(sys._getframe(1)):
            checked(self, **given | {n: getattr(self, n) for n in names if hasattr(self, n)})

    return check_fields


def _made_by_jax(frame) -> bool:
    while "jaxtyping" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(JAX)
