"""Readers of weight files, without torch: the zip files of `torch.save`, and `.safetensors`.

A file of torch.save holds a pickle (`data.pkl`) that describes tensors as views into storages, and
one member `data/KEY` per storage. The pickle is interpreted by `PickleProgram`, which runs no code.
Of both kinds of files tensors are read when asked for.
"""

import math
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from ported_weights.readers.pickle_program import Dictionary, PickleProgram, Symbol
from varjax.errors import UserError
from varjax.io.extras import require

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
# Values that training checkpoints mention beside the weights; kept as names.
INERT = frozenset(
    f"torch.{name}"
    for name in "float32 float16 bfloat16 float64 bool int64 int32 int16 int8 uint8".split()
)
# Element types of safetensors that weights have; float8 and complex ones are refused.
SAFETENSORS = {
    **{f"F{8 * n}": np.dtype(f"<f{n}") for n in (8, 4, 2)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{f"I{8 * n}": np.dtype(f"<i{n}") for n in (8, 4, 2, 1)},
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
MAX_PICKLE = 256 * 2**20  # bytes; real ones have some kilobytes


@dataclass(frozen=True)
class Storage:
    """A flat buffer of the file: `count` elements in zip member `member`."""

    member: str
    dtype: np.dtype
    count: int


@dataclass(frozen=True)
class TorchTensor:
    """A tensor of the file, a strided view into a storage. `read()` gives its values."""

    file: "TorchFile"
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    def read(self) -> np.ndarray:
        """The values. `UserError` if the file is damaged."""
        flat = self.file.read_storage(self.storage)[self.offset :]
        strides = tuple(s * flat.itemsize for s in self.stride)
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)


class TorchFile:
    """An open file; `content` is the unpickled object with `TorchTensor` in place of tensors.

    Raises:
      UserError: not a zip of torch.save, another byte order, damage, or a pickle that refers to
        anything beyond tensors and plain containers.
    """

    def __init__(self, path: Path):
        self.path = path
        self._last: tuple[Storage, np.ndarray] | None = None
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise self._damaged(error) from error
        self._sizes = {info.filename: info.file_size for info in self._zip.infolist()}
        self._root = self._find_root()
        order = f"{self._root}byteorder"
        if order in self._sizes and self._read(order, limit=16).strip() != b"little":
            raise UserError(f"{path} is stored big-endian: save it on a little-endian machine")
        program = PickleProgram(
            functions={
                "collections.OrderedDict": _ordered_dict,
                "torch._utils._rebuild_tensor_v2": self._tensor,
                "torch._utils._rebuild_parameter": self._parameter,
                "torch._utils._rebuild_parameter_with_state": self._parameter,
                "torch.Size": _size,
            },
            constants=lambda name: name in STORAGES or name in INERT,
            storage=self._storage,
            what=str(path),
        )
        self.content = program.run(self._read(f"{self._root}data.pkl", limit=MAX_PICKLE))

    def read_storage(self, storage: Storage) -> np.ndarray:
        """All elements of a storage. The last one stays in memory: tensors often share one."""
        if self._last is None or self._last[0] != storage:
            size = storage.count * storage.dtype.itemsize
            data = self._read(storage.member, limit=self._sizes[storage.member])
            self._last = storage, np.frombuffer(data[:size], storage.dtype)
        return self._last[1]

    # --- the zip ----------------------------------------------------------------------------------

    def _find_root(self) -> str:
        """Folder inside the archive, with its slash."""
        found = (re.fullmatch(r"([^/]*/|)data\.pkl", name) for name in self._sizes)
        roots = [match[1] for match in found if match]
        if any(name.split("/")[1:2] == ["code"] for name in self._sizes):
            raise UserError(f"{self.path} is a TorchScript program: save its state_dict() instead")
        if len(roots) != 1:
            raise UserError(
                f"{self.path} is a zip archive but not one written by torch.save (it has"
                f" {len(roots)} members data.pkl, there must be one)"
            )
        return roots[0]

    def _read(self, member: str, limit: int) -> bytes:
        if self._sizes.get(member, 0) > limit:
            raise UserError(f"{self.path}: {member} is implausibly large")
        try:
            return self._zip.read(member)
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, KeyError) as error:
            raise self._damaged(error) from error
        except (NotImplementedError, RuntimeError) as error:  # encrypted, or exotic compression
            raise UserError(f"cannot read {member} of {self.path}: {error}") from error

    def _damaged(self, reason) -> UserError:
        return UserError(f"{self.path} is damaged or incomplete ({reason}): download it again")

    # --- what the pickle may call -----------------------------------------------------------------

    def _storage(self, identity) -> Storage:
        """From the persistent id ("storage", class, key, device, number of elements)."""
        if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
            raise UserError(f"{self.path}: refused, an unknown kind of storage")
        _, kind, key, _, count = identity
        if not (isinstance(kind, Symbol) and kind.name in STORAGES and isinstance(key, str)):
            name = kind.name if isinstance(kind, Symbol) else type(kind).__name__
            raise UserError(f"{self.path}: refused, storage class {name}")
        member, dtype = f"{self._root}data/{key}", STORAGES[kind.name]
        if not _is_count(count):
            raise UserError(f"{self.path}: the size of storage {key} is not a number")
        needed, present = count * dtype.itemsize, self._sizes.get(member)
        if present is None or present < needed:
            raise self._damaged(f"storage {key} needs {needed} bytes, {present or 0} are there")
        return Storage(member, dtype, count)

    def _tensor(self, storage, offset, shape, stride, *_unused) -> TorchTensor:
        """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata)`."""
        sizes_fit = _is_counts(shape) and _is_counts(stride) and len(shape) == len(stride)
        if not (isinstance(storage, Storage) and _is_count(offset) and sizes_fit):
            raise UserError(f"{self.path}: a tensor is described by malformed values")
        end = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if math.prod(shape) and end > storage.count:
            reach = f"a tensor of shape {list(shape)} reaches element {end}"
            raise self._damaged(f"{reach} of a storage that has {storage.count}")
        return TorchTensor(self, storage, offset, tuple(shape), tuple(stride))

    def _parameter(self, tensor, *_unused) -> TorchTensor:
        if not isinstance(tensor, TorchTensor):
            raise UserError(f"{self.path}: a parameter is described by malformed values")
        return tensor


def tensors(content) -> Mapping[str, TorchTensor]:
    """The entries of a mapping that are tensors under text keys."""
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


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


def _is_counts(values) -> bool:
    return isinstance(values, (tuple, list)) and len(values) <= 64 and all(map(_is_count, values))


# --- safetensors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of the file. `read()` gives its values."""

    file: object
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """{name: tensor} of a file, nothing of it read yet. `UserError` for a damaged file or a type
    that no weights have, `MissingExtra` without the `safetensors` package."""
    safetensors = require("safetensors", extra="port", purpose=f"reading {path}")
    try:
        file = safetensors.safe_open(path, framework="np")
        return {name: _tensor(path, file, name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged or incomplete ({error}): download it again") from error


def _tensor(path: Path, file, name: str) -> SafeTensor:
    entry = file.get_slice(name)
    dtype = SAFETENSORS.get(entry.get_dtype())
    if dtype is None:
        raise UserError(
            f"{path}: tensor {name} has the element type {entry.get_dtype()}, which is not"
            f" supported; supported are {', '.join(SAFETENSORS)}"
        )
    return SafeTensor(file, name, dtype, tuple(entry.get_shape()))
