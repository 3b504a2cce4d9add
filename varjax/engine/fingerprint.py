"""A name for a program before it is traced: a digest of all that tracing depends on.

That is what it is called with (static objects by their contents, arrays by shape and type), the
files of this package, versions, settings of JAX and the machine. Whatever cannot be followed, or is
code of somebody else's, has no fingerprint: its program is traced as usual. Functions that are
replaced while the process runs are not seen.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from flax import nnx

IMPORTED = time.time()
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # which XLA reads when JAX starts
FLAGS_THEN = [os.environ.get(name, "") for name in FLAGS]
PACKAGES = ("varjax", "pallas_kernels")  # whose files are part of the fingerprint
FILES = (".py", ".json")  # sources, and tuned tiles
# whose versions are part of it, and the language's own
VERSIONED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
KNOWN = {*PACKAGES, *VERSIONED, "builtins", "collections"}
ASIDE = ("compilation_cache", "persistent_cache")  # settings of JAX that change no program
# Seconds before the import of this module in which others of the package were imported: what was
# written later need not be what runs.
IMPORTING = 10.0
JITTED = type(jax.jit(abs))
CPU_LINES = 2**14  # bytes of /proc/cpuinfo that describe the first processor


class Unknown(Exception):
    """Something that tracing may depend on in a way that cannot be told."""


def of(said: object, networks: object, arrays: object) -> str | None:
    """Return the digest of a program (hexadecimal), or None where there is none.

    said: what is static in the program and how it is compiled, by contents.
    networks: its modules: parameters by shape and type, all else by contents.
    arrays: its other arguments, arrays by shape and type.
    """
    try:
        walk = _Walk()
        walk.add((said, networks))
        walk.by_shape = True
        walk.add(arrays)
        return digest_of(_files(), surroundings(), walk.digest.hexdigest())
    except Exception:  # besides `Unknown`: objects that do not say what they consist of
        return None


def digest_of(*texts: str) -> str:
    """SHA-256 of texts, hexadecimal."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _files() -> str:
    """Digest of the files of this package. `Unknown` if they may be others than those that run."""
    found = tuple(
        (path, status.st_size, max(status.st_mtime, status.st_ctime))
        for path in _paths()
        for status in [os.stat(path)]
    )
    if max(changed for *_, changed in found) > IMPORTED - IMPORTING:
        raise Unknown("files that have changed since they were imported")
    return _contents(found)


def _paths() -> Iterator[str]:
    for name in PACKAGES:
        main = pathlib.Path(sys.modules[name].__file__)
        if main.suffix != ".py" or not main.is_file():
            raise Unknown(f"{name} has no sources")
        for folder, folders, files in os.walk(main.parent):
            folders.sort()
            yield from (f"{folder}/{file}" for file in sorted(files) if file.endswith(FILES))


@functools.lru_cache(maxsize=2)
def _contents(files: tuple[tuple[str, int, float], ...]) -> str:
    """Digest of files: read once in a process."""
    digest = hashlib.sha256()
    for path, size, _ in files:
        digest.update(f"{path}\0{size}\0".encode())
        digest.update(pathlib.Path(path).read_bytes())
    return digest.hexdigest()


def surroundings() -> str:
    """Digest of what every program on this device depends on: versions, settings, the machine."""
    if FLAGS_THEN != [os.environ.get(name, "") for name in FLAGS]:
        raise Unknown("flags that XLA may not have read")
    device = jax.local_devices()[0]
    settings = {
        name: value
        for name, value in jax.config.values.items()
        if not any(word in name for word in ASIDE)
    }
    said = (
        _versions(),
        sorted((name, repr(value)) for name, value in settings.items()),
        repr(jax.sharding.get_abstract_mesh()),
        FLAGS_THEN,
        (device.platform, device.device_kind, device.id, device.client.platform_version),
        _processor(),
        _cores(),
    )
    return digest_of(repr(said))


@functools.cache
def _versions() -> list[str]:
    return [sys.version, *(f"{n} {importlib.metadata.version(n)}" for n in VERSIONED)]


@functools.cache
def _processor() -> tuple[str, ...]:
    """What XLA's code for a CPU depends on: its instructions."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(CPU_LINES).split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU")
    return (platform.machine(), *(line for line in lines if line.startswith(told)))


def _cores() -> int:
    """Threads between which XLA divides loops when it compiles."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class _Walk:
    """Adds objects to a digest, each once: what is met again is named by its number. Values have
    none: two equal ones are as good as the same one twice, and which of both a program holds
    depends on how its model came here.

    by_shape: whether arrays count by shape and type alone; parameters of modules always do.
    """

    by_shape = False

    def __init__(self):
        self.digest, self._met, self._alive = hashlib.sha256(), {}, []

    def add(self, item: object) -> None:
        if type(item) in (type(None), bool, int, float, complex, str, bytes):
            self._say(type(item).__name__, repr(item))
            return
        met = (id(item), self.by_shape)
        if met in self._met:
            self._say("again", self._met[met])
            return
        if not _is_value(item):
            self._met[met] = len(self._met)
            self._alive.append(item)  # else its number could be given to another object
        self._object(item)

    def _object(self, item: object) -> None:
        if isinstance(item, type):
            self._class(item)
        elif isinstance(item, (np.dtype, jax.sharding.PartitionSpec)):
            self._say("type", repr(item))
        elif isinstance(item, enum.Enum):
            self._class(type(item))
            self._say(item.name)
        elif isinstance(item, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)):
            self._array(item)
        elif isinstance(item, nnx.Variable):
            self._class(type(item))
            self._mapping(item.get_metadata())
            self._parameter(item.get_value())
        elif isinstance(item, functools.partial):
            self._items(item.func, item.args, item.keywords)
        elif isinstance(item, types.MethodType):
            self._items(item.__self__, item.__func__)
        elif isinstance(item, types.FunctionType):
            self._function(item)
        elif isinstance(item, (types.BuiltinFunctionType, JITTED)):
            self._named("function", item)
        else:
            self._compound(item)

    def _compound(self, item: object) -> None:
        self._class(type(item))
        if dataclasses.is_dataclass(item):
            fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
            self._mapping(fields | (_attributes(item) if hasattr(item, "__dict__") else {}))
        elif isinstance(item, Mapping):
            self._mapping(item)
        elif isinstance(item, (tuple, list)):
            self._items(*item)
        elif isinstance(item, (set, frozenset)):
            self._items(*sorted(item, key=repr))
        elif isinstance(item, (int, float, str)):
            self._items(repr(item), _attributes(item))
        elif isinstance(item, nnx.Module) or _package(type(item)) in PACKAGES:
            self._mapping(_attributes(item))
        else:
            raise Unknown(type(item))

    def _parameter(self, value: object) -> None:
        """An array of weights, or several (`varjax.nn.stacked`)."""
        before, self.by_shape = self.by_shape, True
        self.add(value)
        self.by_shape = before

    def _array(self, item: np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct) -> None:
        self._say("array", item.shape, item.dtype, getattr(item, "weak_type", False))
        if self.by_shape or isinstance(item, jax.ShapeDtypeStruct):
            return
        if item.dtype == object or jax.dtypes.issubdtype(item.dtype, jax.dtypes.extended):
            raise Unknown(item.dtype)
        self.digest.update(np.ascontiguousarray(item).tobytes())

    def _mapping(self, items: Mapping) -> None:
        self._say("{", len(items))
        for name, value in items.items():
            self._items(name, value)

    def _items(self, *items: object) -> None:
        self._say("(", len(items))
        for item in items:
            self.add(item)

    def _class(self, item: type) -> None:
        self._named("class", item)

    def _named(self, kind: str, item: type | Callable) -> None:
        """What its module knows under its name, and nothing else of that name."""
        found = sys.modules.get(item.__module__ or "")
        for name in item.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is not item or _package(item) not in KNOWN:
            raise Unknown(item)
        self._say(kind, item.__module__, item.__qualname__)

    def _function(self, item: types.FunctionType) -> None:
        """Functions inside of others, too: code of a file that is known, and what it has seen."""
        code, package = item.__code__, _package(item)
        main = getattr(sys.modules.get(package), "__file__", None)
        inside = main and pathlib.Path(main).parent in pathlib.Path(code.co_filename).parents
        if package not in KNOWN or not inside:
            raise Unknown(item)
        self._say("function", code.co_filename, item.__qualname__, code.co_firstlineno)
        self._items(item.__defaults__, item.__kwdefaults__, getattr(item, "__wrapped__", None))
        self._items(*(cell.cell_contents for cell in item.__closure__ or ()))

    def _say(self, *words: object) -> None:
        self.digest.update("\0".join(map(str, words)).encode() + b"\1")


def _is_value(item: object) -> bool:
    """Whether an object cannot change, and equals others. It leads back to itself only through
    objects that are numbered."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return item.__dataclass_params__.frozen and item.__dataclass_params__.eq
    return isinstance(item, (tuple, frozenset, np.dtype, np.generic, enum.Enum))


def _package(item: type | Callable) -> str:
    return (item.__module__ or "").split(".")[0]


def _attributes(item: object) -> dict:
    """Attributes of an object, without what it computes once and keeps, and what flax notes.
    `Unknown` if it has others than those of its dictionary."""
    if any(vars(kind).get("__slots__") for kind in type(item).__mro__):
        raise Unknown(type(item))
    kept = {
        name
        for kind in type(item).__mro__
        for name, value in vars(kind).items()
        if isinstance(value, functools.cached_property)
    }
    found = getattr(item, "__dict__", {})
    found = {n: v for n, v in found.items() if n not in kept and not n.startswith("_pytree__")}
    return dict(sorted(found.items()))
