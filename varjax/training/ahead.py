"""Pictures in files are decoded while the steps before theirs run, by threads of `grain`.

Which pictures a step takes is not grain's affair: it follows from seed and step
(`stage.pictures_of_step`), whatever the number of processes. So a run goes on at any step, and what
a step sees is what it sees with pictures in memory.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from jaxtyping import Int, UInt8

from varjax.errors import require
from varjax.training.decoding import InFiles

THREADS, FEWEST_AHEAD = 16, 64  # pictures


def library():
    """The package grain. `MissingExtra` if it is not installed."""
    return require("grain", extra="train", purpose="reading pictures while they are trained on")


class Ahead:
    """Batches of pictures, of which the next ones are decoded ahead.

    pictures: in files.
    rows_of: batch -> rows of the pictures in it, int [B], always the same for a batch.
    batches: how many there are; reading ahead ends there.
    """

    def __init__(
        self, pictures: InFiles, rows_of: Callable[[int], Int[np.ndarray, " B"]], batches: int
    ):
        library()
        self._pictures, self._batches = pictures, batches
        self._rows_of = lru_cache(maxsize=8)(rows_of)
        self._next, self._coming = None, iter(())

    def batch(self, n: int) -> UInt8[np.ndarray, "B S S 3"]:
        """Return batch n. One after the other is quick; any other order begins to read anew."""
        if n != self._next:
            self._coming = self._from(n)
        self._next = n + 1
        return next(self._coming)

    def _from(self, first: int) -> Iterator[np.ndarray]:
        grain, size = library(), len(self._rows_of(first))
        options = grain.ReadOptions(
            num_threads=THREADS, prefetch_buffer_size=max(2 * size, FEWEST_AHEAD)
        )
        order = _Order(self._rows_of, first, size, max(self._batches - first, 1))
        read = grain.MapDataset.source(order).map(self._pictures.picture)
        return iter(read.to_iter_dataset(options).batch(size))


class _Order:
    """The rows of batches one after the other, from one on, as grain's sources are."""

    def __init__(self, rows_of: Callable, first: int, size: int, batches: int):
        self._rows_of, self._first, self._size, self._batches = rows_of, first, size, batches

    def __len__(self) -> int:
        return self._batches * self._size

    def __getitem__(self, place: int) -> int:
        batch, i = divmod(place, self._size)
        return int(self._rows_of(self._first + batch)[i])


class OwnRows:
    """Pictures of steps, of which each process decodes those that its devices take.

    steps: how many there are. own: which of the pictures of a step, int [rows].
    """

    def __init__(
        self, pictures: InFiles, rows_of: Callable[[int], np.ndarray], steps: int, own: np.ndarray
    ):
        self._own, self._shape = own, (len(rows_of(0)), *pictures.shape[1:])
        self._ahead = Ahead(pictures, lambda n: rows_of(n)[own], steps)

    def batch(self, n: int) -> np.ndarray:
        """Return uint8 [B, S, S, 3]; pictures of other processes are black."""
        found = np.zeros(self._shape, np.uint8)
        found[self._own] = self._ahead.batch(n)
        return found
