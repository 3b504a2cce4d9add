"""A name for a program before it is traced: a digest of all that tracing depends on.

That is what it is called with (static objects by their contents, arrays by shape and type), the
sources of this package, versions, settings of JAX and the machine. What cannot be followed, or
whose code is not of this package, has no fingerprint: its program is traced as usual.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import os
import pathlib
import platform
import sys
import types
from collections.abc import Callable, Mapping

import jax
import numpy as np
from flax import nnx

PACKAGES = ("varjax", "pallas_kernels")  # whose sources are part of the fingerprint
# whose versions are, and the language's own
VERSIONED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
KNOWN = {*PACKAGES, *VERSIONED, *sys.stdlib_module_names}
ASIDE = ("compilation_cache", "persistent_cache")  # settings of JAX that change no program
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
    except Unknown:
        return None
    return digest_of(_sources(), surroundings(), walk.digest.hexdigest())


def digest_of(*texts: str) -> str:
    """SHA-256 of texts, hexadecimal."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """Digest of all sources of this package, read once in a process."""
    digest = hashlib.sha256()
    for name in PACKAGES:
        folder = pathlib.Path(sys.modules[name].__file__).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def surroundings() -> str:
    """Digest of what every program on this device depends on: versions, settings, the machine."""
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
        [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
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
    """Adds objects to a digest, each once: what is met again is named by its number.

    by_shape: whether arrays count by shape and type alone; parameters of modules always do.
    """

    by_shape = False

    def __init__(self):
        self.digest, self._met, self._alive = hashlib.sha256(), {}, []

    def add(self, item: object) -> None:
        if item is None or isinstance(item, (bool, int, float, complex, str, bytes)):
            self._plain(item)
            return
        if id(item) in self._met:
            self._say("again", self._met[id(item)])
            return
        self._met[id(item)] = len(self._met)
        self._alive.append(item)  # else its number could be given to another object
        self._object(item)

    def _plain(self, item: object) -> None:
        if type(item).__module__ != "builtins":
            self._class(type(item))
        self._say(type(item).__name__, repr(item))

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
        elif isinstance(item, (types.FunctionType, types.BuiltinFunctionType, JITTED)):
            self._function(item)
        else:
            self._compound(item)

    def _compound(self, item: object) -> None:
        self._class(type(item))
        if isinstance(item, Mapping):
            self._mapping(item)
        elif isinstance(item, (tuple, list)):
            self._items(*item)
        elif isinstance(item, (set, frozenset)):
            self._items(*sorted(item, key=repr))
        elif dataclasses.is_dataclass(item):
            self._mapping({f.name: getattr(item, f.name) for f in dataclasses.fields(item)})
        elif isinstance(item, nnx.Module) or _package(type(item)) in PACKAGES:
            if not hasattr(item, "__dict__"):
                raise Unknown(type(item))
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
        if _package(item) not in KNOWN:
            raise Unknown(item)
        self._say("class", item.__module__, item.__qualname__)

    def _function(self, item: Callable) -> None:
        if _package(item) not in KNOWN:
            raise Unknown(item)
        self._say("function", item.__module__, item.__qualname__)
        if isinstance(item, types.FunctionType):
            self._say(item.__code__.co_firstlineno)
            self._items(item.__defaults__, item.__kwdefaults__)
            self._items(*inspect.getclosurevars(item).nonlocals.items())

    def _say(self, *words: object) -> None:
        self.digest.update("\0".join(map(str, words)).encode() + b"\1")


def _package(item: type | Callable) -> str:
    return (item.__module__ or "").split(".")[0]


def _attributes(item: object) -> dict:
    """Attributes of an object, without what it computes once and keeps, and what flax notes."""
    kept = {
        name
        for kind in type(item).__mro__
        for name, value in vars(kind).items()
        if isinstance(value, functools.cached_property)
    }
    found = {n: v for n, v in vars(item).items() if n not in kept and not n.startswith("_pytree__")}
    return dict(sorted(found.items()))
