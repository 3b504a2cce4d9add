"""Files of finished batches, and `OUT.partial`, the folder of an unfinished run that holds them.

A file is `.npz` as NumPy writes it, read as it was written or not at all.

Each file holds a digest of the settings that it was made with, its own name, and a seal, which is
a digest of everything else. A file that was cut short, altered, renamed or written by another
program raises `Damaged` and does no harm: `varjax.storage.npz` compares sizes with the file before
it takes memory, and reads no pickles.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from experiments.json_text import json_safe
from varjax.core.errors import UserError, show, some
from varjax.storage import lock, npz
from varjax.storage.atomic import DESKTOP, new_file, write_text
from varjax.storage.manifest import parse_json, read_json

SETTINGS = "settings"  # the array that holds the digest of the settings
NAME = "name"  # the array that holds the name of the file
CONTENT = "content"  # the array that holds JSON data, if there are any
SEAL = "seal"  # the array that holds the digest of all other arrays


class Damaged(Exception):
    """Description of what is wrong with a file."""


def write_batch(
    path: pathlib.Path,
    settings: str,
    arrays: Mapping[str, np.ndarray],
    content: Mapping | None = None,
) -> None:
    """Write arrays to a new file. settings: digest of the settings that they were made with.
    content: JSON data besides (`read_with`)."""
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    if content is not None:
        text = json.dumps(json_safe(content)).encode("utf-8", "surrogatepass")
        arrays[CONTENT] = np.frombuffer(text, np.uint8)
    arrays |= {SETTINGS: np.array(settings), NAME: np.array(path.name)}
    with new_file(path) as file:
        np.savez(file, **arrays, **{SEAL: np.array(_seal(arrays))})


def read_batch(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file. `Damaged` if `write_batch` did not write this file under this
    name, or it was changed since; `OSError` if there is none."""
    arrays = _load(path)
    seal = str(arrays.pop(SEAL, ""))
    if seal != _seal(arrays) or not str(arrays.pop(SETTINGS, "")):
        raise Damaged("it has been altered")
    if (name := str(arrays.pop(NAME, ""))) != path.name:
        raise Damaged(f"it was written as {name!r:.60}")
    return arrays


def read_with(path: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Return (JSON data, arrays) of a file. Raises the errors of `read_batch`."""
    arrays = read_batch(path)
    return parse_json(bytes(arrays.pop(CONTENT)).decode("utf-8", "surrogatepass")), arrays


def settings_of(path: pathlib.Path) -> str:
    """Return the digest of the settings that a file was made with; no other array is read. Raises
    the errors of `read_batch`."""
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
    """The images that a run keeps in files of consecutive ones; `check` looks at a file.

    count: images of the run. batch_size: images that are drawn at a time; the last time there may
      be fewer. images: which of them this process makes (`experiments.parts`); None: all.
    """

    count: int
    batch_size: int
    images: range | None = None

    @property
    def made(self) -> range:
        return range(self.count) if self.images is None else self.images

    def check(self, start: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise `Damaged` unless the arrays of a file are images of this series from image `start`
        on."""
        index = arrays["index"]
        if not len(index) or not np.array_equal(index, np.arange(start, start + len(index))):
            raise Damaged(f"its images are not {start} and those after it")
        if start not in self.made or start + len(index) > self.made.stop:
            raise Damaged(f"its images {start} to {start + len(index) - 1} are not of this run")


# --- the folder of an unfinished run ---

SETTINGS_FILE = "settings.json"
PIXELS = "pixels.npy"  # all pictures, while results are written
PART = "part.npz"  # what a finished part of a run says (`experiments.parts`)
_FINISHED = (
    # a series of pictures, features or numbers with its first image; or a cell of a sweep; or what
    # a part of either says
    r"(?:part|(?:main|full|samples|reference|pairs)-\d{8,}|cell-[0-9a-f]{16})\.npz"
)
_OURS = rf"(?:{_FINISHED}|{re.escape(SETTINGS_FILE)}|{re.escape(PIXELS)})"
OURS = re.compile(rf"{_OURS}|\.{_OURS}\.\d+|{lock.NAME}")  # .NAME.123 is not complete yet
FINISHED = re.compile(_FINISHED)


class WorkFolder:
    """The folder of an unfinished run.

    path: it need not exist. description: JSON data; it is equal for two runs exactly if one may
    continue the other.
    """

    def __init__(self, path: pathlib.Path, description: dict):
        self.path, self.description = path, description
        self.settings = json.dumps(description, sort_keys=True)
        self._mine = parse_json(self.settings)  # as a file holds them: with lists, no tuples
        self.digest = hashlib.sha256(self.settings.encode()).hexdigest()

    def check(self, overwrite: bool) -> None:
        """Raise `UserError` if anything else than a run lies here, or another run that may not be
        discarded."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise UserError(
                f"{self.path} is a link or no folder: unfinished runs are kept under that name, so "
                "move it away or choose another --out"
            )
        for path in self._all():
            plain = path.is_file() and not path.is_symlink()
            if not plain or not (OURS.fullmatch(path.name) or path.name in DESKTOP):
                raise UserError(
                    f"{self.path} holds {path.name!a:.80}, which no run writes: unfinished runs "
                    "are kept under that name and nothing else, so move it away or choose another "
                    "--out"
                )
        if not overwrite and (conflict := self.conflict()):
            raise UserError(
                f"{self.path} holds an unfinished run {conflict}: use its settings (or put its "
                f"{SETTINGS_FILE} back) to continue it, add --overwrite to discard it, or choose "
                "another --out"
            )

    def conflict(self) -> str | None:
        """Return why the run here cannot be continued; None if it can, or if there is none. Its
        settings are those of settings.json and of every finished file; damaged files say none."""
        said = set()
        for path in self.finished():
            with contextlib.suppress(Damaged):
                said.add(settings_of(path))
        mine, theirs = self._mine, self._theirs()
        if said <= {self.digest} and (said or theirs in (None, mine)):
            return None
        if not said and not isinstance(theirs, dict):
            return f"whose {SETTINGS_FILE} is missing or damaged, so that nothing says which it is"
        names = [n for n in mine if isinstance(theirs, dict) and theirs.get(n, mine[n]) != mine[n]]
        each = [f"{n} {show(theirs[n])}, now {show(mine[n])}" for n in names]
        return "with other settings" + (f" ({some(each, 3, '; ')})" if each else "")

    def _theirs(self) -> object:
        """Return what settings.json holds; None without one, "?" if it is damaged."""
        try:
            return read_json(self.path / SETTINGS_FILE)
        except UserError:
            return "?" if os.path.lexists(self.path / SETTINGS_FILE) else None

    def _all(self) -> list[pathlib.Path]:
        return sorted(self.path.iterdir()) if self.path.is_dir() else []

    def finished(self) -> list[pathlib.Path]:
        """Return the files of finished batches and cells, damaged ones too."""
        return [path for path in self._all() if FINISHED.fullmatch(path.name)]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and keep other processes out. It is removed again if nothing was written.
        `UserError` if another process holds it."""
        busy = f"another run is writing to {self.path}: wait, or choose --out"
        try:
            with lock.held(self.path, busy):
                yield
        finally:
            with contextlib.suppress(OSError):  # it stays if it is not empty
                self.path.rmdir()

    def start(self) -> None:
        """Make the folder this run's. A run that cannot be continued is discarded. Call it while
        the folder is held."""
        if self.conflict():
            self.clear()
        for path in self._all():  # left by a process that was killed
            if path.name.startswith(".") or path.name == PIXELS:
                path.unlink()
        if self._theirs() != self._mine:
            write_text(self.path / SETTINGS_FILE, self.settings)

    def clear(self) -> None:
        """Remove all files of runs; `held` removes the folder at its end."""
        for path in self._all():
            if path.name != lock.NAME and (OURS.fullmatch(path.name) or path.name in DESKTOP):
                with contextlib.suppress(OSError):
                    path.unlink()
