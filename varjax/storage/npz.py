"""Arrays of `.npz` files that users give: checked against the file before memory is taken.

Compressed ones are read, but a small file that would unpack to gigabytes is not, nor are pickles.
"""

import contextlib
import io
import math
import os
import zipfile
from collections.abc import Collection, Iterator

import numpy as np

from varjax.errors import UserError
from varjax.storage import ordinary

FORMAT = np.lib.format
LARGEST = 64 * 2**20  # bytes of an array that are read however small they were packed
LARGEST_HEADER = 2**16
MOST_PACKED = 64  # times: what a larger array may unpack to


def names(path: str | os.PathLike) -> list[str]:
    """Those of the arrays in a file; `UserError` if it cannot be read."""
    with _members(path) as (_, members):
        return list(members)


def load(
    path: str | os.PathLike, wanted: Collection[str], largest: int = LARGEST
) -> dict[str, np.ndarray]:
    """The arrays with these names, those of them that the file holds.

    largest: bytes of an array that may have been packed to less than 1/64.

    Raises:
      UserError: no ordinary file, damaged, arrays of objects, or packed to much less than 1/64.
    """
    with _members(path) as (archive, members):
        chosen = {name: member for name, member in members.items() if name in wanted}
        for name, member in chosen.items():
            _check(archive, name, member, largest)
        return {name: _read(archive, member) for name, member in chosen.items()}


@contextlib.contextmanager
def _members(path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """The file and, by name, what it says of its arrays; all that goes wrong is a `UserError`."""
    try:
        with ordinary.opened(path) as file, zipfile.ZipFile(file) as archive:
            arrays = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            members = {m.filename.removesuffix(".npy"): m for m in arrays}
            if len(members) < len(arrays):
                raise ValueError("two of its arrays have the same name")
            if any(m.compress_size > os.fstat(file.fileno()).st_size for m in arrays):
                raise ValueError("it says to hold more bytes than it has")
            yield archive, members
    except Exception as error:  # zipfile and NumPy raise many kinds over damaged files
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = " ".join(reason.split())
        raise UserError(
            f"cannot read {path} as an npz file of plain arrays: {reason:.200}"
        ) from None


def _check(archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo, largest: int) -> None:
    size = member.file_size
    if size > max(largest, MOST_PACKED * member.compress_size):
        raise ValueError(
            f"array {name!r:.60} has {size} bytes packed into {member.compress_size}: store it"
            " without compression"
        )
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"array {name!r:.60} is packed in a way that NumPy does not use")
    with archive.open(member) as packed:
        file = io.BytesIO(packed.read(LARGEST_HEADER))
        shape, dtype = _header(name, file)
        if file.tell() + math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"array {name!r:.60} has another size than its shape says")


def _header(name: str, file) -> tuple[tuple[int, ...], np.dtype]:
    version = FORMAT.read_magic(file)
    read = {(1, 0): FORMAT.read_array_header_1_0, (2, 0): FORMAT.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"array {name!r:.60} has format version {version}")
    shape, _, dtype = read[version](file)
    if dtype.hasobject or not dtype.itemsize:  # of nothing a file can hold any number
        raise ValueError(f"array {name!r:.60} has type {str(dtype):.60}")
    return shape, dtype


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        return FORMAT.read_array(file, allow_pickle=False)
