"""Files of finished batches: `.npz` as NumPy writes it, read as it was written or not at all.

Each file holds a digest of the settings that it was made with, its own name, and a seal, which is
a digest of everything else. A file that was cut short, altered, renamed or written by another
program raises `Damaged` and does no harm: sizes are compared with the file before memory is taken,
and nothing is compressed or pickled.
"""

import contextlib
import hashlib
import math
import pathlib
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from varjax.storage import ordinary
from varjax.storage.atomic import new_file

SETTINGS = "settings"  # the array that holds the digest of the settings
NAME = "name"  # the array that holds the name of the file
SEAL = "seal"  # the array that holds the digest of all other arrays
OWN = (SETTINGS, NAME, SEAL)
CHUNK = 2**20  # bytes read at a time
ArrayType = tuple[np.dtype, tuple[int, ...]]  # element type, shape


class Damaged(Exception):
    """What is wrong with a file, in words."""


def write(path: pathlib.Path, settings: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a new file. settings: digest of the settings that they were made with."""
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    arrays |= {SETTINGS: np.array(settings), NAME: np.array(path.name)}
    seals = {
        name: _seal(name, array.dtype, array.shape, [array.reshape(-1).view(np.uint8)])
        for name, array in arrays.items()
    }
    arrays[SEAL] = np.array(_joined(seals))
    with new_file(path) as file:
        np.savez(file, **arrays)


def read(
    path: pathlib.Path, wanted: Collection[str] | None = None
) -> tuple[dict[str, ArrayType], dict[str, np.ndarray]]:
    """Return (types of all arrays, the arrays themselves).

    Every array is read, so that the seal is checked, but only arrays named in `wanted` are kept in
    memory; None keeps all.

    Raises:
      Damaged: `write` did not write this file under this name, or it was changed since.
      OSError: the file cannot be opened.
    """
    types, arrays, seals = {}, {}, {}
    with _opened(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as file:
                shape, order, dtype = _header(file)
                if file.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
                    raise Damaged(f"{name} has another size than its shape says")
                types[name], data = (dtype, shape), iter(lambda f=file: f.read(CHUNK), b"")
                if wanted is None or name in wanted or name in OWN:
                    data = [file.read()]
                    arrays[name] = np.frombuffer(data[0], dtype).reshape(shape, order=order)
                seals[name] = _seal(name, dtype, shape, data)  # reads to the end
        seals.pop(SEAL, None)
        _check_own({name: str(arrays.pop(name, "")) for name in OWN}, _joined(seals), path.name)
        return {name: found for name, found in types.items() if name not in OWN}, arrays


def _check_own(own: Mapping[str, str], seal: str, name: str) -> None:
    if own[SEAL] != seal or not own[SETTINGS]:
        raise Damaged("it has been altered")
    if own[NAME] != name:
        raise Damaged(f"it was written as {own[NAME]!r:.60}")


def _seal(name: str, dtype: np.dtype, shape: tuple[int, ...], data: Iterable) -> str:
    """Return the digest of an array's name, type, shape and bytes. data: buffers, in order."""
    digest = hashlib.sha256(f"{name} {dtype.str} {shape}".encode())
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def _joined(seals: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(sorted(seals.values())).encode()).hexdigest()


def settings_of(path: pathlib.Path) -> str | None:
    """Return the digest of the settings that a file was made with; no other array is read.

    None: an older version wrote the file, without its name. Raises the errors of `read`."""
    with _opened(path) as archive:
        there = {name.removesuffix(".npy") for name in archive.namelist()}
        if NAME not in there and there & {"index", "row"}:  # a batch, a cell
            return None
        if SETTINGS not in there:
            raise Damaged("it does not say what it is")
        with archive.open(f"{SETTINGS}.npy") as file:
            shape, _, dtype = _header(file)
            return str(np.frombuffer(file.read(), dtype).reshape(shape))


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[zipfile.ZipFile]:
    """Open the file as a zip archive whose members need no more memory than the file has bytes.
    Whatever goes wrong while it is read becomes `Damaged`."""
    with ordinary.opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                _check_directory(archive.infolist(), file.seek(0, 2))
                yield archive
        except (Damaged, MemoryError):
            raise
        except Exception as error:  # zipfile and NumPy raise many kinds over damaged files
            raise Damaged(str(error)) from None


def _check_directory(members: list[zipfile.ZipInfo], size: int) -> None:
    if any(m.compress_type != zipfile.ZIP_STORED for m in members):
        raise Damaged("it is compressed")
    distinct = len({m.filename for m in members}) == len(members)
    if sum(m.file_size for m in members) > size or not distinct:
        raise Damaged("its directory does not fit its size")


def _header(file: BinaryIO) -> tuple[tuple[int, ...], str, np.dtype]:
    """Read (shape, order, type) of an array; `Damaged` unless it holds numbers or text."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise Damaged("it is of another version")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except MemoryError as error:  # Python's parser raises it for deeply nested headers
        raise Damaged(str(error)) from None
    if dtype.kind not in "biufU":
        raise Damaged(f"it holds {dtype.kind!r}, no numbers or text")
    return shape, "F" if fortran else "C", dtype


@dataclass(frozen=True)
class Series:
    """The images that a run keeps in files of consecutive ones; `check` tells whether a file is
    one of them.

    count: images of the run. batch_size: images that are drawn at a time; the last time there may
      be fewer. arrays: {name: type of the array, with the shape for one image}.
    images: which of them this process makes (`experiments.shards`); None: all.
    """

    count: int
    batch_size: int
    arrays: Mapping[str, ArrayType]
    images: range | None = None

    @property
    def made(self) -> range:
        """The images that are made here."""
        return range(self.count) if self.images is None else self.images

    def starts(self) -> range:
        """Return the number of each batch's first image."""
        return self.made[:: self.batch_size]

    def index(self, start: int) -> np.ndarray:
        """Return the numbers of the images in the batch that begins with image `start`."""
        return np.arange(start, min(start + self.batch_size, self.made.stop))

    def check(
        self, start: int, types: Mapping[str, ArrayType], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Raise `Damaged` unless a file holds images of this series from image `start` on.

        types: of all arrays in the file. arrays: `index` and, if there are any, `images`."""
        index = arrays.get("index")
        count = len(index) if index is not None and index.ndim == 1 else 0
        if not count or not np.array_equal(index, np.arange(start, start + count)):
            raise Damaged(f"its images are not {start} and those after it")
        if start not in self.made or start + count > self.made.stop:
            raise Damaged(f"its images {start} to {start + count - 1} are not of this run")
        expected = {name: (t, (count, *shape)) for name, (t, shape) in self.arrays.items()}
        found = {name: array_type for name, array_type in types.items() if name != "index"}
        if found != expected:
            raise Damaged(f"it holds {found}, a batch {expected}"[:400])
        images = arrays.get("images")  # only some series have them
        if images is not None and images.dtype.kind == "f" and not np.isfinite(images).all():
            raise Damaged("its images are not finite")
