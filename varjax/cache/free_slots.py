"""Free slots of the pool, and their choice for a head, so that it needs few blocks.

OwnRanges      all heads have room beside each other for the most that they ever hold: each has
               a range of its own, which crosses at most one block more than it has to
CommonSlots    they have not, because some grow while others shrink: a head fills unused blocks;
               when there are none left, it gets what others have left over in theirs
"""

import bisect
import heapq

import numpy as np


class OwnRanges:
    """A range of slots for every head.

    most: int [L, N], the most that each head ever holds.
    """

    def __init__(self, most: np.ndarray, block_size: int):
        # head n of layer l has slots edges[l * N + n] to the next edge
        self._edges = np.concatenate([[0], np.cumsum(most, dtype=np.int64)])
        self._block_size = block_size
        self._used = np.zeros(self._edges[-1], bool)
        self._count = np.zeros(-(-self._used.size // block_size), np.int64)  # used slots per block
        self._next = self._edges[:-1].reshape(most.shape).copy()  # behind what was ever used
        self._free_before = False  # whether anything was ever freed

    @property
    def blocks_in_use(self) -> int:
        return int(np.count_nonzero(self._count))

    def take(self, layer: int, counts: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Takes the first free slots of each head's range, head after head (`CommonSlots.take`)."""
        # As long as nothing was ever freed, the first free slot is the one behind all used ones. No
        # search is needed then.
        if self._free_before:
            # the free slots with the lowest numbers in each head's range, for all heads at once
            edges = self._edges[layer * counts.size :][: counts.size + 1]
            free = edges[0] + np.flatnonzero(~self._used[edges[0] : edges[-1]])
            head = np.searchsorted(edges, free, side="right") - 1
            turn = np.arange(free.size) - np.searchsorted(free, edges)[head]
            taken = free[turn < counts[head]]
        else:
            ends = np.cumsum(counts)
            first = np.repeat(self._next[layer] - (ends - counts), counts)
            self._next[layer] += counts
            taken = first + np.arange(first.size)
        self._used[taken] = True
        # `add.at`, because a block occurs as often as it has slots among these
        np.add.at(self._count, taken // self._block_size, 1)
        return taken

    def give(self, slots: np.ndarray) -> None:
        """Frees slots."""
        self._free_before |= slots.size > 0
        self._used[slots] = False
        np.subtract.at(self._count, slots // self._block_size, 1)


class CommonSlots:
    """A number of blocks that all heads share. The caller makes sure that they suffice."""

    def __init__(self, blocks: int, block_size: int):
        self._size = block_size
        self._used = np.zeros((blocks, block_size), bool)
        # A heap, so that the lowest number comes first and plans are always the same.
        self._whole = list(range(blocks))
        self._runs: dict[int, list[tuple[int, int]]] = {}  # free runs of blocks that are in use
        # the same runs as (length, block, first), sorted, so that bisection finds one that fits
        self._by_length: list[tuple[int, int, int]] = []

    @property
    def blocks_in_use(self) -> int:
        return len(self._used) - len(self._whole)

    def take(self, layer: int, counts: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Takes slots for the heads of a layer, head after head. In this order: behind `last` as
        far as there is room, blocks that nobody uses, the shortest free run that holds the rest,
        the longest runs.

        counts: int [N], how many slots each head gets.
        last: int [N], the slot behind which a head likes to continue (-1: none).
        """
        found = [np.zeros(0, np.int64)]
        for count, behind in zip(counts.tolist(), last.tolist(), strict=True):
            # Every change of block is another table entry, which kernels copy and look up on their
            # own.
            while count:
                block, before = divmod(behind, self._size)
                runs = self._runs.get(block, ()) if behind >= 0 else ()
                room = next((b - a for a, b in runs if a == before + 1), 0)  # right behind it
                fits = bisect.bisect_left(self._by_length, (count, -1, -1))
                if room:
                    first = before + 1
                elif self._whole:
                    block, first, room = heapq.heappop(self._whole), 0, self._size
                    self._list(block, [(0, room)])
                else:
                    room, block, first = self._by_length[min(fits, len(self._by_length) - 1)]
                size = min(room, count)
                self._used[block, first : first + size] = True
                left = [(a + size if a == first else a, b) for a, b in self._runs[block]]
                self._list(block, [(a, b) for a, b in left if a < b])
                found.append(block * self._size + np.arange(first, first + size))
                count, behind = count - size, -1
        return np.concatenate(found)

    def give(self, slots: np.ndarray) -> None:
        """Frees slots. A block without used slots becomes whole again."""
        # runs of a block are listed anew: what is freed may join runs on both sides
        self._used.reshape(-1)[slots] = False
        for block in np.unique(slots // self._size).tolist():
            free = ~self._used[block]
            edges = np.diff(np.pad(free, 1).astype(np.int8))
            first, last = (np.flatnonzero(edges == step).tolist() for step in (1, -1))
            self._list(block, [] if free.all() else list(zip(first, last, strict=True)))
            if free.all():
                heapq.heappush(self._whole, block)

    def _list(self, block: int, runs: list[tuple[int, int]]) -> None:
        """Replaces the free runs that are listed for a block."""
        # A run is found by its length and by its block, so both lists change together.
        for a, b in self._runs.pop(block, ()):
            del self._by_length[bisect.bisect_left(self._by_length, (b - a, block, a))]
        for a, b in runs:
            bisect.insort(self._by_length, (b - a, block, a))
        if runs:
            self._runs[block] = runs
