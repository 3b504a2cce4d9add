"""Readers of weight files, without torch: the zip files of `torch.save`, and `.safetensors`.

A file of torch.save holds a pickle (`data.pkl`) that describes tensors as views into storages, and
one member `data/KEY` per storage. `PickleProgram` interprets the pickle and runs no code. Tensors
are read only when asked for, in both kinds of files. `readers.legacy` has torch's old format.
"""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ported_weights.readers.archive import Archive, damaged
from ported_weights.readers.pickle_program import (
    LONGEST_NAME,
    Dictionary,
    PickleProgram,
    Symbol,
    name_of,
)
from varjax.core.errors import UserError
from varjax.storage.values import require

# Little-endian element types of torch's storage classes.
STORAGES = {
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.DoubleStorage": np.dtype("<f8"),
    "torch.LongStorage": np.dtype("<i8"),
    "torch.IntStorage": np.dtype("<i4"),
    "torch.ShortStorage": np.dtype("<i2"),
    "torch.CharStorage": np.dtype("i1"),
    "torch.ByteStorage": np.dtype("u1"),
    "torch.BoolStorage": np.dtype("?"),
    "torch.storage.UntypedStorage": np.dtype("u1"),
}
# Values that training checkpoints mention beside the weights. They stay names.
INERT = frozenset(
    f"torch.{name}"
    for name in "float32 float16 bfloat16 float64 bool int64 int32 int16 int8 uint8"
    " uint16 uint32 uint64 complex32 complex64 complex128 quint8 qint8 qint32"
    " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()
)
# Element types of safetensors that weights have; float8 and complex ones are refused.
SAFETENSORS = {f"F{8 * n}": np.dtype(f"<f{n}") for n in (8, 4, 2)}
SAFETENSORS |= {"BF16": np.dtype(ml_dtypes.bfloat16)}
SAFETENSORS |= {f"I{8 * n}": np.dtype(f"<i{n}") for n in (8, 4, 2, 1)}
SAFETENSORS |= {"U8": np.dtype("u1"), "BOOL": np.dtype("?")}
MAX_PICKLE = 32 * 2**20  # bytes; real ones have some kilobytes
MAX_HEADER = 16 * 2**20  # bytes of the header of safetensors; real ones have some kilobytes
MAX_AXES = 32  # every version of NumPy allows as many
MAX_REPEATED = 2**27  # elements of a tensor with more elements than its storage (an expanded view)
# A storage may be larger than its tensors, as that of a slice is, but not out of all proportion.
MAX_UNUSED, MAX_UNUSED_RATIO = 64 * 2**20, 16


@dataclass(frozen=True)
class Storage:
    """A flat buffer of the file: `count` elements.

    member: its name in the zip, or its key in a file of the old format.
    """

    member: str
    dtype: np.dtype
    count: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class TorchTensor:
    """A tensor of the file: a strided view into a storage."""

    file: "TorchFile"
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    @property
    def end(self) -> int:
        """One past the last element of the storage that the tensor reads; 0: it reads none."""
        steps = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset + steps + 1 if all(self.shape) else 0

    def read(self) -> np.ndarray:
        """Read the values. `UserError` if the file is damaged."""
        if not self.end:
            return np.empty(self.shape, self.dtype)
        flat = self.file.values(self.storage, self.offset, self.end)
        strides = tuple(s * flat.itemsize for s in self.stride)
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)


class TorchFile:
    """An open file of torch.save. `content` is the unpickled object, with a `TorchTensor` for each
    tensor. `UserError` if the file is no zip of torch.save, has another byte order, is damaged, or
    its pickle refers to anything beyond tensors and plain containers."""

    def __init__(self, path: Path):
        self.path = path
        self._archive = Archive(path)
        self._elements = self._archive.values
        self._used: Counter[str] = Counter()  # {member: elements of the tensors in it}
        self._root = self._find_root()
        order = f"{self._root}byteorder"
        if self._archive.size(order) is not None:
            if self._archive.read(order, most=16).strip() != b"little":
                raise UserError(f"{path} is stored big-endian: save it on a little-endian machine")
        pickled = self._archive.read(f"{self._root}data.pkl", most=MAX_PICKLE)
        self.content = self._program().run(pickled)

    def _program(self) -> PickleProgram:
        """Return an interpreter for a pickle of the file."""
        return PickleProgram(
            functions={
                "collections.OrderedDict": _ordered_dict,
                "torch._utils._rebuild_tensor_v2": self._tensor,
                "torch._utils._rebuild_parameter": self._parameter,
                "torch._utils._rebuild_parameter_with_state": self._parameter,
                "torch.Size": _size,
            },
            constants=lambda name: name in STORAGES or name in INERT,
            storage=self._storage,
            what=str(self.path),
        )

    def values(self, storage: Storage, first: int, end: int) -> np.ndarray:
        """Read elements `first` to `end` - 1 of a storage."""
        size, used = storage.num_bytes, self._used[storage.member] * storage.dtype.itemsize
        if size > max(MAX_UNUSED, MAX_UNUSED_RATIO * used):
            raise UserError(
                f"{self.path}: storage {storage.member} has {size} bytes, of which tensors use"
                f" {used}: save clones of the tensors instead"
            )
        return self._elements(storage.member, storage.dtype, first, end)

    def _find_root(self) -> str:
        """Return the folder inside the archive that holds everything, with its slash."""
        names = self._archive.names
        found = (re.fullmatch(r"([^/]*/|)data\.pkl", name) for name in names)
        roots = [match[1] for match in found if match]
        if any(name.split("/")[1:2] == ["code"] for name in names):
            raise UserError(f"{self.path} is a TorchScript program: save its state_dict() instead")
        if len(roots) != 1:
            raise UserError(
                f"{self.path} is a zip archive but not one written by torch.save (it has"
                f" {len(roots)} members data.pkl, there must be one)"
            )
        return roots[0]

    # --- what the pickle may call -----------------------------------------------------------------

    def _storage(self, identity: object) -> Storage:
        """Read the persistent id ("storage", class, key, device, number of elements)."""
        key, dtype, count = self._identity(identity, 5)
        member = f"{self._root}data/{key}"
        storage, present = Storage(member, dtype, count), self._archive.size(member)
        needed = storage.num_bytes
        if present is None or not needed <= present < needed + dtype.itemsize:
            has = f"{present or 0} are there"
            raise damaged(self.path, f"storage {key:.80} needs {needed} bytes, {has}")
        return storage

    def _identity(self, identity: object, length: int) -> tuple[str, np.dtype, int]:
        """Return key, element type and number of elements of a persistent id. The device does not
        matter, since values are read on the host."""
        is_id = isinstance(identity, tuple) and len(identity) == length
        if not (is_id and identity[0] == "storage"):
            raise UserError(f"{self.path}: refused, an unknown kind of storage")
        _, kind, key, _, count = identity[:5]
        if not (isinstance(kind, Symbol) and kind.name in STORAGES and isinstance(key, str)):
            raise UserError(f"{self.path}: refused, storage class {name_of(kind)}")
        if not _is_count(count):
            raise UserError(f"{self.path}: the size of storage {key:.80} is not a number")
        return key, STORAGES[kind.name], count

    def _tensor(self, storage, offset, shape, stride, *_unused) -> TorchTensor:
        """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata)`."""
        sizes_fit = _is_counts(shape) and _is_counts(stride) and len(shape) == len(stride)
        if not (isinstance(storage, Storage) and _is_count(offset) and sizes_fit):
            raise UserError(f"{self.path}: a tensor is described by malformed values")
        found = TorchTensor(self, storage, offset, tuple(shape), tuple(stride))
        elements = math.prod(n or 1 for n in shape)
        if found.end > storage.count:
            reach = f"a tensor of shape {list(shape)} reaches element {found.end}"
            raise damaged(self.path, f"{reach} of a storage that has {storage.count}")
        if elements > max(storage.count, MAX_REPEATED):
            raise UserError(
                f"{self.path}: a tensor of shape {list(shape)} repeats the {storage.count} elements"
                " of its storage: it is implausibly large"
            )
        self._used[storage.member] += elements
        return found

    def _parameter(self, tensor, *_unused) -> TorchTensor:
        if not isinstance(tensor, TorchTensor):
            raise UserError(f"{self.path}: a parameter is described by malformed values")
        return tensor


def tensors(content: object) -> Mapping[str, TorchTensor]:
    """Return the entries of a mapping that are tensors under text keys."""
    if not isinstance(content, Dictionary):
        return {}
    return {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, TorchTensor)}


def _ordered_dict(*arguments) -> Dictionary:
    if arguments:
        raise UserError("refused: an OrderedDict is created with arguments, torch.save never does")
    return Dictionary()


def _size(*arguments) -> tuple[int, ...]:
    if len(arguments) != 1 or not _is_counts(arguments[0]):
        raise UserError("refused: torch.Size is created with malformed arguments")
    return tuple(arguments[0])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


def _is_counts(values: object) -> bool:
    fits = isinstance(values, (tuple, list)) and len(values) <= MAX_AXES
    return fits and all(map(_is_count, values))


# --- safetensors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of the safetensors file `path`."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Read the values. The file is opened for each tensor: an open one stays mapped, and what
        was read of it would count as memory of this process."""
        with _opened(self.path) as file:
            return file.get_tensor(self.name)


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """Open a file and return {name: tensor}; values are not read yet. `UserError` if the file is
    damaged, or has a type that no weights have; `MissingExtra` without `safetensors`."""
    found = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            if len(name) > LONGEST_NAME:
                reason = f"is no name of a tensor: it is {len(name)} long"
                raise UserError(f"{path}: {name:.80}... {reason}")
            entry = file.get_slice(name)
            dtype = SAFETENSORS.get(entry.get_dtype())
            if dtype is None:
                raise UserError(
                    f"{path}: tensor {name} has the element type {entry.get_dtype()}, which is not"
                    f" supported; supported are {', '.join(SAFETENSORS)}"
                )
            found[name] = SafeTensor(path, name, dtype, tuple(entry.get_shape()))
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file with `safetensors.safe_open` for a while. `UserError` if it is damaged, also
    while it is read."""
    safetensors = require("safetensors", extra="port", purpose=f"reading {path}")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise damaged(path, error) from error
