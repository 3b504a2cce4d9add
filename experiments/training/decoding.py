"""Picture files as uint8 arrays of one size, decoded at once, or when they are asked for."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from varjax.core.errors import UserError, some
from varjax.storage import ordinary
from varjax.storage.manifest import is_text
from varjax.storage.pictures import ENDINGS, STORED, fit_picture, picture_files, read_picture
from varjax.storage.values import require

SHUFFLE_SEED = 0  # which pictures of a folder are held out must not depend on the run
REACH = 2  # the largest move of a copied picture, in pixels
MOVES = tuple(  # (rows, columns)
    (y, x) for y in range(2 * REACH + 1) for x in range(2 * REACH + 1) if (y, x) != (REACH, REACH)
)

THREADS, FEWEST_AHEAD = 16, 64  # pictures


def library():
    """The package grain. `MissingExtra` if it is not installed."""
    return require("grain", extra="train", purpose="reading pictures while they are trained on")


def read_square(source: Path | bytes, name: str, image_size: int) -> UInt8[np.ndarray, "S S 3"]:
    """Return the square in the middle of a picture. Else as `read_picture`."""
    return fit_picture(read_picture(source, name, STORED), (image_size, image_size))


def together(found: Iterable[np.ndarray], count: int, image_size: int) -> np.ndarray:
    """Return pictures as one array uint8 [N, S, S, 3]."""
    images = np.empty((count, image_size, image_size, 3), np.uint8)
    for i, image in enumerate(found):
        images[i] = image
    return images


def list_folders(path: Path, limit: int) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return names of pictures below `path` in random order, labels, and class names in order."""
    classes = sorted(p for p in path.iterdir() if p.is_dir() and not ordinary.is_hidden(p.name))
    files = [f.relative_to(path) for f in sorted(picture_files(classes))]
    if not files:
        raise UserError(
            f"{path} holds neither train.npz nor class folders with pictures ({', '.join(ENDINGS)})"
        )
    numbers = {c.name: number for number, c in enumerate(classes)}
    if empty := sorted(numbers.keys() - {f.parts[0] for f in files}):
        raise UserError(f"{path}: no pictures in class folder {some(empty)}")
    if odd := [c for c in classes if not is_text(c.name)]:
        raise UserError(f"{path}: the name of class folder {odd[0].name!r:.60} is not Unicode")
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(files))[: limit or None]
    chosen = np.array([str(files[i]) for i in order], object)
    labels = np.array([numbers[files[i].parts[0]] for i in order], np.int32)
    return chosen, labels, tuple(numbers)


def moved(
    picture: UInt8[np.ndarray, "S S 3"], y: int, x: int, reach: int = REACH
) -> UInt8[np.ndarray, "S S 3"]:
    """Return a picture at another place, its edges repeated. y, x: rows and columns that it moves
    up and left, plus `reach`, the largest move."""
    edged = np.pad(picture, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    return edged[y : y + len(picture), x : x + len(picture)]


@dataclass(frozen=True, eq=False)
class InFiles:
    """Pictures that stay in their files: indexed like uint8 [N, S, S, 3], and decoded then.

    names: of the files below `root`.
    moves: int [pictures, copies], none without copies. After the pictures come their copies, each
      moved (`data.with_shifts`): first a copy of each, then another of each.
    """

    root: Path
    names: Sequence[str]
    image_size: int
    moves: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.int8))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self), self.image_size, self.image_size, 3

    def __len__(self) -> int:
        return len(self.names) * (1 + self.moves.shape[1])

    def picture(self, row: int) -> UInt8[np.ndarray, "S S 3"]:
        """Decode one. `UserError` if its file is damaged or gone."""
        copy, number = divmod(int(row), len(self.names))
        path = self.root / self.names[number]
        found = read_square(path, str(path), self.image_size)
        return moved(found, *MOVES[self.moves[number, copy - 1]]) if copy else found

    def __getitem__(self, rows: np.ndarray | slice) -> UInt8[np.ndarray, "n S S 3"]:
        chosen = np.arange(len(self))[rows]
        return together(map(self.picture, chosen), len(chosen), self.image_size)


class Ahead:
    """Batches of pictures, decoded by threads of `grain` while the steps before theirs run. To
    grain it is the source of the pictures of all batches, one after the other, without end.

    Which pictures a step takes is not grain's affair: it follows from seed and step
    (`stage.pictures_of_step`), whatever the number of processes. So a run goes on at any step, and
    what a step sees is what it sees with pictures in memory.

    pictures: in files.
    rows_of: batch -> rows of the pictures in it, int [B], always the same for a batch.
    own: which pictures of a batch are read, int [rows], those of this process; None: all.
    """

    def __init__(
        self,
        pictures: InFiles,
        rows_of: Callable[[int], Int[np.ndarray, " B"]],
        own: Int[np.ndarray, " rows"] | None = None,
    ):
        self._pictures, self._rows_of = pictures, lru_cache(maxsize=8)(rows_of)
        self._count = len(rows_of(0))
        self._own = np.arange(self._count) if own is None else own
        self._next, self._coming = None, iter(())

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, place: int) -> UInt8[np.ndarray, "S S 3"]:
        batch, i = divmod(place, len(self._own))
        return self._pictures.picture(self._rows_of(batch)[self._own[i]])

    def batch(self, n: int) -> UInt8[np.ndarray, "B S S 3"]:
        """Return batch n; pictures of other processes are black. One after the other is quick; any
        other order begins to read anew."""
        if n != self._next:
            grain, size = library(), len(self._own)
            most = max(2 * size, FEWEST_AHEAD)
            options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=most)
            coming = grain.MapDataset.source(self)[n * size :]
            self._coming = iter(coming.to_iter_dataset(options).batch(size))
        self._next = n + 1
        found = np.zeros((self._count, *self._pictures.shape[1:]), np.uint8)
        found[self._own] = next(self._coming)
        return found
