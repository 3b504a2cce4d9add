"""Picture files as uint8 arrays of one size, decoded at once, or when they are asked for."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from varjax.io.pictures import STORED, fit_picture, read_picture

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
