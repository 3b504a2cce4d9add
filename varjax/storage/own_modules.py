"""Modules of the user's own: files or import names that register policies, models or metrics."""

import hashlib
import importlib
import importlib.util
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from varjax.core.errors import UserError
from varjax.storage.values import path

_LOADED: dict[tuple[str, ...], tuple[str, ...]] = {}  # by kinds, and file or import name


@dataclass(frozen=True)
class Kind:
    """Kind of things that a user's module may register.

    registries: what they add to. module_of: name of the module that an entry of the first one comes
    from. how: how something is registered, for messages.
    """

    name: str
    registries: Sequence[MutableMapping]
    module_of: Callable[[Any], str]
    how: str

    def load(self, path_or_name: str | os.PathLike) -> tuple[str, ...]:
        """Imports a module that registers such things of your own, once, and returns their names,
        which are known from now on. path_or_name: a .py file anywhere, or the import name of a
        module. `UserError`: it is not there, fails while it is imported, or registers nothing or a
        taken name; what is known is then as it was."""
        return load([self], path_or_name)


def load(kinds: Sequence[Kind], path_or_name: str | os.PathLike) -> tuple[str, ...]:
    """`Kind.load` of a module that may register things of several kinds."""
    words = " or ".join(kind.name for kind in kinds)
    given = os.fspath(path(f"{words} module", path_or_name))
    is_file = given.endswith(".py") or os.sep in given
    file = pathlib.Path(given).resolve()
    key = str(file) if is_file else given
    # files of one name may differ
    name = f"{file.stem}_{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    place = (*(kind.name for kind in kinds), key)
    if place not in _LOADED:
        registries = [registry for kind in kinds for registry in kind.registries]
        before = [dict(registry) for registry in registries]
        known = {kind.name: set(kind.registries[0]) for kind in kinds}
        try:
            module = _import_file(file, name) if is_file else importlib.import_module(key)
            found = [  # what is new, or was registered when the module was imported elsewhere
                new
                for kind in kinds
                for new, entry in kind.registries[0].items()
                if new not in known[kind.name] or kind.module_of(entry) == module.__name__
            ]
            if not found:
                how = ", or ".join(kind.how for kind in kinds)
                raise UserError(f"it registers no {words}: {how}")
            _LOADED[place] = tuple(found)
        except BaseException as error:
            for registry, content in zip(registries, before, strict=True):
                registry.clear()
                registry.update(content)
            if is_file:  # what it has registered is gone: it is run again next time
                sys.modules.pop(name, None)
            if isinstance(error, KeyboardInterrupt):  # anything else is the module's own affair
                raise
            raise UserError(f"{words} module {given}: {_what_is_wrong(error, key)}") from error
    return _LOADED[place]


def _import_file(path: pathlib.Path, name: str) -> ModuleType:
    if not path.is_file():
        raise UserError("there is no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError("it is no Python file: its name has to end in .py")
    if name in sys.modules:  # it registers something of another kind, too
        return sys.modules[name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _what_is_wrong(error: BaseException, key: str) -> str:
    """One line: where, and what."""
    if isinstance(error, ModuleNotFoundError) and error.name == key.split(".")[0]:
        return "there is no module of this name: give one that can be imported, or a .py file"
    if isinstance(error, SyntaxError):
        return f"{pathlib.Path(error.filename or key).name}, line {error.lineno}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == key]
    place = f"line {frames[-1].lineno}: " if frames else ""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{place}{kind}{' '.join(str(error).split())}"
