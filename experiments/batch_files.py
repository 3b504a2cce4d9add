"""Files of finished batches: `.npz` as NumPy writes it, read as it was written or not at all.

Each file holds a digest of the settings that it was made with, its own name, and a seal, which is
a digest of everything else. A file that was cut short, altered, renamed or written by another
program raises `Damaged` and does no harm: `varjax.storage.npz` compares sizes with the file before
it takes memory, and reads no pickles.
"""

import hashlib
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from varjax.errors import UserError
from varjax.storage import npz
from varjax.storage.atomic import new_file

SETTINGS = "settings"  # the array that holds the digest of the settings
NAME = "name"  # the array that holds the name of the file
SEAL = "seal"  # the array that holds the digest of all other arrays
ArrayType = tuple[np.dtype, tuple[int, ...]]  # element type, shape


class Damaged(Exception):
    """What is wrong with a file, in words."""


def write(path: pathlib.Path, settings: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a new file. settings: digest of the settings that they were made with."""
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    arrays |= {SETTINGS: np.array(settings), NAME: np.array(path.name)}
    with new_file(path) as file:
        np.savez(file, **arrays, **{SEAL: np.array(_seal(arrays))})


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file.

    Raises:
      Damaged: `write` did not write this file under this name, or it was changed since.
      OSError: there is no file.
    """
    arrays = _load(path)
    seal = str(arrays.pop(SEAL, ""))
    if seal != _seal(arrays) or not str(arrays.pop(SETTINGS, "")):
        raise Damaged("it has been altered")
    if (name := str(arrays.pop(NAME, ""))) != path.name:
        raise Damaged(f"it was written as {name!r:.60}")
    return arrays


def settings_of(path: pathlib.Path) -> str:
    """Return the digest of the settings that a file was made with; no other array is read. Raises
    the errors of `read`."""
    found = _load(path, {SETTINGS})
    if SETTINGS not in found:
        raise Damaged("it does not say what it is")
    return str(found[SETTINGS])


def _load(path: pathlib.Path, wanted: set[str] | None = None) -> dict[str, np.ndarray]:
    os.stat(path)  # a missing file is not damaged
    try:
        return npz.load(path, npz.names(path) if wanted is None else wanted)
    except UserError as error:
        raise Damaged(str(error)) from None


def _seal(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a digest of the names, types, shapes and bytes of arrays."""
    each = []
    for name, array in arrays.items():
        digest = hashlib.sha256(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
        each.append(digest.hexdigest())
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest()


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

    def check(self, start: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise `Damaged` unless the arrays of a file are images of this series from image `start`
        on."""
        index = arrays.get("index")
        count = len(index) if index is not None and index.ndim == 1 else 0
        if not count or not np.array_equal(index, np.arange(start, start + count)):
            raise Damaged(f"its images are not {start} and those after it")
        if start not in self.made or start + count > self.made.stop:
            raise Damaged(f"its images {start} to {start + count - 1} are not of this run")
        expected = {name: (t, (count, *shape)) for name, (t, shape) in self.arrays.items()}
        found = {name: (a.dtype, a.shape) for name, a in arrays.items() if name != "index"}
        if found != expected:
            raise Damaged(f"it holds {found}, a batch {expected}"[:400])
        images = arrays.get("images")  # only some series have them
        if images is not None and images.dtype.kind == "f" and not np.isfinite(images).all():
            raise Damaged("its images are not finite")
