"""Pictures in files are decoded while the steps before theirs run, by threads of `grain`.

Which pictures a step takes is not grain's affair: it follows from seed and step
(`stage.pictures_of_step`), whatever the number of processes. So a run goes on at any step, and what
a step sees is what it sees with pictures in memory.
"""

import sys
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
    """Batches of pictures, of which the next ones are decoded ahead. To grain it is the source of
    the pictures of all batches, one after the other, without end.

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
            self._coming = self._from(n)
        self._next = n + 1
        found = np.zeros((self._count, *self._pictures.shape[1:]), np.uint8)
        found[self._own] = next(self._coming)
        return found

    def _from(self, first: int) -> Iterator[np.ndarray]:
        grain, size = library(), len(self._own)
        ahead = max(2 * size, FEWEST_AHEAD)
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=ahead)
        coming = grain.MapDataset.source(self)[first * size :]
        return iter(coming.to_iter_dataset(options).batch(size))
