"""Arrays of `.npz` files that users give: checked against the file before memory is taken.

Compressed ones are read, but a small file that would unpack to gigabytes is not, nor are pickles.
"""

import contextlib
import math
import os
import zipfile
from collections.abc import Collection, Iterator

import numpy as np

from varjax.core.errors import UserError, some
from varjax.storage import ordinary

FORMAT = np.lib.format
LARGEST = 64 * 2**20  # bytes of an array that are read however small they were packed
MOST_PACKED = 64  # times: what a larger array may unpack to


def names(path: str | os.PathLike) -> list[str]:
    """Names of the arrays in a file; `UserError` if it cannot be read."""
    with _readable(path), _opened(path) as (_, members):
        return list(members)


def load(
    path: str | os.PathLike, wanted: Collection[str], largest: int = LARGEST
) -> dict[str, np.ndarray]:
    """The arrays of a file that have one of these names. `UserError`: the file is no ordinary one,
    is damaged, holds arrays of objects, or unpacks to too much.

    largest: bytes up to which an array is read however small it was packed. A larger array may have
      been packed to 1/64 of its size, but not to less.
    """
    found = {}
    with _readable(path), _opened(path) as (archive, members):
        for name, member in members.items():
            if name not in wanted:
                continue
            if member.file_size > max(largest, MOST_PACKED * member.compress_size):
                raise ValueError(
                    f"array {name!r:.60} has {member.file_size} bytes packed into"
                    f" {member.compress_size}: store it without compression"
                )
            with archive.open(member) as file:
                _header(name, member, file)
                file.seek(0)
                found[name] = FORMAT.read_array(file, allow_pickle=False)
    return found


class Rows:
    """An array of a file that is read a few rows at a time, so that it never lies in memory as a
    whole. shape, dtype: of the whole array. `UserError`: the file is no ordinary one or is damaged;
    there is no such array, or it has no rows."""

    def __init__(self, path: str | os.PathLike, name: str):
        self.path, self._stack = path, contextlib.ExitStack()
        held = names(path)
        if name not in held:
            listed = some([f"{one:.60}" for one in held], 8) or "nothing"
            raise UserError(f"{path} has no array `{name}`: it holds {listed}")
        with _readable(path):
            archive, members = self._stack.enter_context(_opened(path))
            self._file = self._stack.enter_context(archive.open(members[name]))
            self.shape, self.dtype, order = _header(name, members[name], self._file)
            self._start, self._row = self._file.tell(), math.prod(self.shape[1:])
            if not self.shape or (order and len(self.shape) > 1):
                raise ValueError(f"array {name!r:.60} has no rows, or is stored columns first")

    def read(self, first: int, end: int) -> np.ndarray:
        """Rows `first` to `end` - 1. Reading backwards unpacks the array again from its start."""
        size = self._row * self.dtype.itemsize
        with _readable(self.path):
            self._file.seek(self._start + first * size)
            data = self._file.read((end - first) * size)
            if len(data) != (end - first) * size:
                raise ValueError("it ends too early")
        return np.frombuffer(data, self.dtype).reshape(end - first, *self.shape[1:])


@contextlib.contextmanager
def _readable(path) -> Iterator[None]:
    """Turns every error that zipfile and NumPy raise over damaged files into a `UserError`."""
    try:
        yield
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = " ".join(reason.split())
        raise UserError(
            f"cannot read {path} as an npz file of plain arrays: {reason:.200}"
        ) from None


@contextlib.contextmanager
def _opened(path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """The open file, and its arrays' entries by name."""
    with ordinary.opened(path) as file, zipfile.ZipFile(file) as archive:
        arrays = [m for m in archive.infolist() if m.filename.endswith(".npy")]
        members = {m.filename.removesuffix(".npy"): m for m in arrays}
        if len(members) < len(arrays):
            raise ValueError("two of its arrays have the same name")
        if any(m.compress_size > os.fstat(file.fileno()).st_size for m in arrays):
            raise ValueError("it says to hold more bytes than it has")
        yield archive, members


def _header(name: str, member: zipfile.ZipInfo, file) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape, type, whether columns come first; the file is then where the numbers begin."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"array {name!r:.60} is packed in a way that NumPy does not use")
    version = FORMAT.read_magic(file)
    read = {(1, 0): FORMAT.read_array_header_1_0, (2, 0): FORMAT.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"array {name!r:.60} has format version {version}")
    shape, columns_first, dtype = read[version](file)
    if dtype.hasobject or not dtype.itemsize:  # of nothing a file can hold any number
        raise ValueError(f"array {name!r:.60} has type {str(dtype):.60}")
    if file.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
        raise ValueError(f"array {name!r:.60} has another size than its shape says")
    return shape, dtype, columns_first
