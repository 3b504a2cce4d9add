"""Picture files as uint8 arrays of one size, decoded at once, or when they are asked for."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from varjax.errors import UserError, some
from varjax.io.pictures import ENDINGS, STORED, fit_picture, picture_files, read_picture
from varjax.storage import ordinary
from varjax.storage.manifest import is_text

SHUFFLE_SEED = 0  # which pictures of a folder are held out must not depend on the run
REACH = 2  # the largest move of a copied picture, in pixels
MOVES = tuple(  # (rows, columns)
    (y, x) for y in range(2 * REACH + 1) for x in range(2 * REACH + 1) if (y, x) != (REACH, REACH)
)


def read(source: Path | bytes, name: str, image_size: int) -> UInt8[np.ndarray, "S S 3"]:
    """Return the square in the middle of a picture. Arguments and errors are those of
    `read_picture`."""
    return fit_picture(read_picture(source, name, STORED), (image_size, image_size))


def together(found: Iterable[np.ndarray], count: int, image_size: int) -> np.ndarray:
    """Return pictures as one array uint8 [N, S, S, 3]."""
    images = np.empty((count, image_size, image_size, 3), np.uint8)
    for i, image in enumerate(found):
        images[i] = image
    return images


def list_folders(path: Path, limit: int) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return names of pictures below `path` in random order, labels, and class names in
    alphabetical order."""
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


def draw_moves(pictures: int, copies: int, seed: int) -> Int[np.ndarray, "N copies"]:
    """For each copy of each picture an index into `MOVES`; those of a picture are all different."""
    rng, found = np.random.default_rng((seed, copies)), np.empty((pictures, copies), np.int8)
    for i in range(pictures):
        found[i] = rng.choice(len(MOVES), copies, replace=False)
    return found


def moved(
    edged: UInt8[np.ndarray, "s s 3"], move: int, size: int
) -> UInt8[np.ndarray, "size size 3"]:
    """Return a picture at another place. edged: by `with_edges`. move: index into `MOVES`."""
    y, x = MOVES[move]
    return edged[y : y + size, x : x + size]


def with_edges(picture: UInt8[np.ndarray, "S S 3"]) -> UInt8[np.ndarray, "s s 3"]:
    """Repeat the edges of a picture as far as moves reach."""
    return np.pad(picture, ((REACH, REACH), (REACH, REACH), (0, 0)), mode="edge")


@dataclass(frozen=True, eq=False)
class InFiles:
    """Pictures that stay in their files: indexed like uint8 [N, S, S, 3], by arrays of rows, which
    are decoded then.

    names: of the files below `root`.
    moves: int [pictures, copies]. After the pictures come their copies, each moved
      (`draw_moves`): first a copy of each, then another of each.
    """

    root: Path
    names: Sequence[str]
    image_size: int
    moves: np.ndarray

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self), self.image_size, self.image_size, 3

    def __len__(self) -> int:
        return len(self.names) * (1 + self.moves.shape[1])

    def picture(self, row: int) -> UInt8[np.ndarray, "S S 3"]:
        """Decode one. `UserError` if its file is damaged or gone."""
        copy, number = divmod(int(row), len(self.names))
        path = self.root / self.names[number]
        found = read(path, str(path), self.image_size)
        if not copy:
            return found
        return moved(with_edges(found), self.moves[number, copy - 1], self.image_size)

    def __getitem__(self, rows: np.ndarray) -> UInt8[np.ndarray, "n S S 3"]:
        return together(map(self.picture, rows), len(rows), self.image_size)

    def digest(self) -> bytes:
        """A checksum of names and sizes of the files: reading all of them would take long."""
        found = hashlib.sha256(repr(self.image_size).encode())
        for name in self.names:
            found.update(f"{name} {(self.root / name).stat().st_size}\n".encode())
        return found.digest()
