"""The checker of the import hook in conftest.py: jaxtyping annotations, and nothing else.

Kinds of number, ranks and equal letters of one signature are checked at every call of a function
and at every construction of a dataclass. Other annotations (protocols, `int` for what may be a
NumPy integer) are for readers.

What a check sees are types, shapes and dtypes. When these have passed once, another call with the
same ones is not checked again, which is most calls. Functions without annotations of arrays are
left as they are.
"""

import dataclasses
import functools
import inspect
import pathlib
import sys
from types import UnionType
from typing import Union, get_args, get_origin

import jax
import jaxtyping
from beartype import beartype
from jax.extend import source_info_util
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


def install() -> None:
    """Check what is imported from now on. The hook of jaxtyping decorates everything with
    `jaxtyping.jaxtyped`, which is what takes time: ours stands in for it."""
    source_info_util.register_exclusion(__file__)  # no line of user code for jax to name
    always = jaxtyping.jaxtyped
    jaxtyping.install_import_hook(annotated_modules(), "tests.annotations.check")
    jaxtyping.jaxtyped = functools.partial(_decorator, always)


def check(function):
    """Type checker for `jaxtyping.jaxtyped`, which calls it with an empty function that has the
    parameters and annotations of one of ours: only annotations of arrays count."""
    hints = {name: hint for name, hint in function.__annotations__.items() if of_arrays(hint)}
    function.__annotations__ = hints
    return beartype(function) if hints else function


def of_arrays(hint) -> bool:
    """Whether a jaxtyping annotation is part of an annotation."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(of_arrays, get_args(hint)))


def _decorator(always, *, typechecker):
    """Stands in for `jaxtyping.jaxtyped`, the decorator `always`, which checks every call."""
    always = functools.partial(always, typechecker=typechecker)
    return lambda made: _fields(made, always) if inspect.isclass(made) else _calls(made, always)


def _calls(function, always):
    hints = {name: hint for name, hint in function.__annotations__.items() if of_arrays(hint)}
    if not hints:
        return function
    kinds = _kinds_of_arguments(function, hints)
    result, passed = "return" in hints, set()
    every = functools.cache(lambda: always(function))  # made when it is called

    @functools.wraps(function)
    def checked(*args, **given):
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **given)
        if kinds is None:
            return every()(*args, **given)
        before = kinds(args, given)
        if before not in passed:
            out = every()(*args, **given)
            passed.update((before, (before, _kind(out)) if result else before))
            return out
        out = function(*args, **given)
        if result and (after := (before, _kind(out))) not in passed:
            always(functools.wraps(function)(lambda *_, **__: out))(*args, **given)
            passed.add(after)
        return out

    return checked


def _kinds_of_arguments(function, hints: dict):
    """What returns the kinds of the arguments that are checked, from those of a call; None where
    this is not all that a check sees."""
    parameters = inspect.signature(function).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if not all(map(_by_kind, hints.values())) or inspect.isgeneratorfunction(function):
        return None
    if any(p.kind in several for p in parameters):
        return None
    places = [(i, p.name) for i, p in enumerate(parameters) if p.name in hints]

    def kinds(args, given):
        count = len(args)
        return tuple(
            [_kind(args[i]) if i < count else _kind(given.get(name, ...)) for i, name in places]
        )

    return kinds


def _by_kind(hint) -> bool:
    """Whether a value passes by its kind alone. Shapes may depend on numbers among the arguments
    (in braces), and of a list only some items are looked at."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return "{" not in hint.dim_str
    parts = get_args(hint)
    fixed = get_origin(hint) in (Union, UnionType, tuple) and ... not in parts
    return not of_arrays(hint) or (fixed and all(map(_by_kind, parts)))


def _kind(value):
    """All that an annotation, of those `_by_kind` lets pass, says of a value."""
    if isinstance(value, tuple):
        return type(value), *map(_kind, value)
    return type(value), getattr(value, "shape", None), getattr(value, "dtype", None)


def _fields(made: type, always) -> type:
    """Checks the fields of a dataclass when it is made: what `__post_init__` has refused or turned
    into arrays is no concern. jax rebuilds registered dataclasses of anything (shapes without data,
    shardings, None, objects of its own); only those of our code are checked."""
    if not dataclasses.is_dataclass(made) or "__init__" not in vars(made):
        return made
    init, passed = made.__init__, set()
    hints = {name: hint for name, hint in init.__annotations__.items() if of_arrays(hint)}
    if not hints:
        return made
    by_kind = all(map(_by_kind, hints.values()))
    every = functools.cache(lambda: always(functools.wraps(init)(lambda *_, **__: None)))

    @functools.wraps(init)
    def checked(self, *args, **given):
        __tracebackhide__ = True
        init(self, *args, **given)
        maker = sys._getframe(1).f_code.co_filename
        if maker.startswith(JAX) or jaxtyping.config.jaxtyping_disable:
            return
        kinds = tuple([_kind(getattr(self, name, ...)) for name in hints])
        if kinds not in passed:
            names = [name for name in inspect.signature(init).parameters if name != "self"]
            every()(self, **given | {n: getattr(self, n) for n in names if hasattr(self, n)})
            passed.update([kinds] if by_kind else [])

    made.__init__ = checked
    return made
