"""Files of finished batches: `.npz` as NumPy writes it, read as it was written or not at all.

Each file says which settings it was made with, so that a folder of them says so as well, and which
file it is, and has a seal: a digest of all that is in it. A file that was cut short, altered,
renamed or is somebody else's is `Damaged`, and never anything worse: sizes are compared with the
file before memory is taken, and nothing is compressed or pickled.
"""

import contextlib
import hashlib
import math
import pathlib
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from varjax.storage.atomic import new_file

SETTINGS = "settings"  # the array that holds the digest of the settings
NAME = "name"  # that of the name of the file
SEAL = "seal"  # that of all others
OWN = (SETTINGS, NAME, SEAL)
CHUNK = 2**20


class Damaged(Exception):
    """What is wrong with a file, in words."""


@dataclass(frozen=True)
class Stored:
    """kinds: {name: (type, shape)} of all arrays; arrays: those that were asked for."""

    kinds: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
    arrays: Mapping[str, np.ndarray]


def write(path: pathlib.Path, settings: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays; settings: digest of what they were made with."""
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    arrays |= {SETTINGS: np.array(settings), NAME: np.array(path.name)}
    seals = {
        name: _seal(name, array.dtype, array.shape, [array.reshape(-1).view(np.uint8)])
        for name, array in arrays.items()
    }
    with new_file(path) as file:
        np.savez(file, **arrays, **{SEAL: np.array(_joined(seals))})


def read(path: pathlib.Path, wanted: Collection[str] | None = None) -> Stored:
    """All arrays, or those of these names; the others are read too, so that a sound file is known
    to be sound, but not kept.

    Raises:
      Damaged: not a file that `write` wrote under this name, or not any more.
      OSError: it cannot be opened.
    """
    kinds, arrays, seals = {}, {}, {}
    with _opened(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as file:
                shape, order, dtype = _header(file)
                if file.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
                    raise Damaged(f"{name} has another size than its shape says")
                kinds[name], data = (dtype, shape), iter(lambda f=file: f.read(CHUNK), b"")
                if wanted is None or name in wanted or name in OWN:
                    data = [file.read()]
                    arrays[name] = np.frombuffer(data[0], dtype).reshape(shape, order=order)
                seals[name] = _seal(name, dtype, shape, data)  # reads to the end
        seals.pop(SEAL, None)
        _check_own({name: str(arrays.pop(name, "")) for name in OWN}, _joined(seals), path.name)
        return Stored({name: kind for name, kind in kinds.items() if name not in OWN}, arrays)


def _check_own(own: Mapping[str, str], seal: str, name: str) -> None:
    if own[SEAL] != seal or not own[SETTINGS]:
        raise Damaged("it has been altered")
    if own[NAME] != name:
        raise Damaged(f"it was written as {own[NAME]!r:.60}")


def _seal(name: str, dtype: np.dtype, shape: tuple, data: Iterable) -> str:
    """Digest of an array: what it is called, its type and shape, its bytes."""
    digest = hashlib.sha256(f"{name} {dtype.str} {shape}".encode())
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def _joined(seals: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(sorted(seals.values())).encode()).hexdigest()


def settings_of(path: pathlib.Path) -> str | None:
    """What a file says of its settings; nothing else is read. None: it is of an older
    version and does not say what it is. Errors: as `read`."""
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
    """The file as a zip that takes no more memory than it is large; `Damaged` for all that goes
    wrong while it is read."""
    with open(path, "rb") as file:
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


def _header(file) -> tuple[tuple[int, ...], str, np.dtype]:
    """(shape, order, type) of an array that is no object."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise Damaged("it is of another version")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except MemoryError as error:  # Python's parser says so of deep nesting
        raise Damaged(str(error)) from None
    if dtype.kind not in "biufU":
        raise Damaged(f"it holds {dtype.kind!r}, no numbers or text")
    return shape, "F" if fortran else "C", dtype


@dataclass(frozen=True)
class Series:
    """The batches of a run, by which files are known that are none of them.

    count: images of the run. batch_size: images of a batch, fewer in the last one. arrays: {name:
    (type, shape for one image)}.
    """

    count: int
    batch_size: int
    arrays: Mapping[str, tuple[np.dtype, tuple[int, ...]]]

    def starts(self) -> range:
        """The first image of every batch."""
        return range(0, self.count, self.batch_size)

    def index(self, start: int) -> np.ndarray:
        """The images of the batch that starts with this one."""
        return np.arange(start, min(start + self.batch_size, self.count))

    def check(self, start: int, stored: Stored) -> None:
        """Raise `Damaged` unless these arrays are that batch."""
        index = self.index(start)
        expected = {name: (t, (len(index), *shape)) for name, (t, shape) in self.arrays.items()}
        found = {name: kind for name, kind in stored.kinds.items() if name != "index"}
        if found != expected:
            raise Damaged(f"it holds {found}, a batch {expected}"[:400])
        if not np.array_equal(stored.arrays.get("index"), index):
            raise Damaged(f"its images are not {start} to {index[-1]}")
        images = stored.arrays.get("images")  # of some series only
        if images is not None and images.dtype.kind == "f" and not np.isfinite(images).all():
            raise Damaged("its images are not finite")
