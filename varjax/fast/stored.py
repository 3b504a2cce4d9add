"""Parameters that lie in a file until their places are known.

A network whose leaves are `Stored` knows all shapes and types. Whoever places it reads what each
device takes, and no more (`varjax.generation.weights`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

Ranges = Sequence[tuple[int, int]]  # of indices along an axis: first, and one behind the last
WHOLE = None  # the axis of a part that has all of an array
Read = Callable[[int | None, Ranges], np.ndarray]


@dataclass(eq=False)
class Stored:
    """An array that is read by part.

    read: what `part` calls.
    origin: the array of all layers that this is a layer of; itself if it is none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Read
    origin: "Stored" = None
    _kept: tuple[object, np.ndarray] | None = field(default=None, init=False, repr=False)

    def __post_init__(self):
        self.origin = self.origin or self

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def part(self, axis: int | None = WHOLE, ranges: Ranges = ()) -> np.ndarray:
        """The ranges of an axis side by side, or (`WHOLE`) all of the array."""
        return self.read(axis, tuple(ranges))

    def kept(self, axis: int | None, ranges: Ranges) -> np.ndarray:
        """`part`, which is kept until another part or `forget`: layers are asked for one by one."""
        if self._kept is None or self._kept[0] != (axis, ranges):
            self._kept = None  # before the next one is read
            self._kept = (axis, ranges), self.part(axis, ranges)
        return self._kept[1]

    def forget(self) -> None:
        """Frees what is kept."""
        self.origin._kept = None

    def __getitem__(self, index: int) -> "Stored":
        """A layer."""

        def read(axis, ranges):
            return self.kept(None if axis is WHOLE else axis + 1, ranges)[index]

        return Stored(self.shape[1:], self.dtype, read, self)

    @property
    def T(self) -> "Stored":
        """A matrix that lies the other way in memory."""

        def read(axis, ranges):
            found = self.part(axis if axis is WHOLE else 1 - axis, ranges)
            return np.ascontiguousarray(found.T)  # a view would lie as before

        return Stored(self.shape[::-1], self.dtype, read, self.origin)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        found = self.part()
        return found if dtype is None else found.astype(dtype)


# a parameter of a network, with or without values
Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct | Stored


def part_of(leaf, axis: int | None, ranges: Ranges) -> np.ndarray:
    """`Stored.part` of any parameter with values."""
    if isinstance(leaf, Stored):
        return leaf.part(axis, ranges)
    array = np.asarray(leaf)
    if axis is WHOLE:
        return array
    before = (slice(None),) * axis
    parts = [array[(*before, slice(*bounds))] for bounds in ranges]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
