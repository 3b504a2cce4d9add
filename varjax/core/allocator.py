"""Slots of the pool: which token of which head lies where, and when.

Lifetimes are known on the host. A slot is taken when layer l of scale s stores its tokens; it is
free again after the attention of the last scale that reads it. Freed slots pass to any layer or
head, so the pool is the peak of live tokens over all (scale, layer) events, rounded up to a block.

Kernels copy whole blocks, and a table entry names one run of slots in a block. What a head holds
should therefore lie in few runs, above all at the last scales, which have most queries. So slots
are chosen from the last scale back to the first, which fits as well: what the last scales read lies
together, and what was dropped before lies where tokens come later.

    OwnRanges      all heads have room beside each other for the most that they ever hold: each has
                   a range of its own, which crosses at most one block more than it has to
    CommonSlots    they have not, because some grow while others shrink: a head fills what is free
                   beside its slots, then unused blocks, then what others have left over in theirs
"""

import bisect
import heapq
from collections.abc import Iterator

import numpy as np

from varjax.core.allocation import Allocation, Geometry, RegionAllocation
from varjax.core.errors import UserError

LARGEST_TABLE = 2**27  # entries of 6 bytes (id, start, stop): 0.8 GB
Runs = tuple[np.ndarray, ...]  # of slots: head, block, first slot, last slot + 1


def after_each_store(per_layer: np.ndarray) -> np.ndarray:
    """int [K, L]: what the whole cache holds right after layer l of scale s has stored.

    per_layer: int [K, L], what each layer holds when scale s starts. Layers up to l already hold
      what scale s + 1 will see. The last scale stores nothing.
    """
    return after_each_layer(np.concatenate([per_layer[1:], per_layer[-1:]]), per_layer)


def after_each_layer(done: np.ndarray, waiting: np.ndarray) -> np.ndarray:
    """int [..., L]: what the whole cache holds when layers up to l hold `done`, later ones still
    `waiting`."""
    return np.cumsum(done, -1) + waiting.sum(-1, keepdims=True) - np.cumsum(waiting, -1)


def peak_tokens(geometry: Geometry, allocation: Allocation) -> int:
    """Most tokens that are live at any time (one row)."""
    held = allocation.capacity(geometry).sum(-1, dtype=np.int64)
    return int(after_each_store(held).max(initial=0))


class PoolLayout:
    """Slots of every scale, layer and head: `ids`, `start`, `stop` and `write_slots` of a
    `ScalePlan`, and `blocks_in_use`, int64 [K, L], right after each store."""

    def __init__(self, geometry: Geometry, allocation: Allocation, block_size: int):
        self.geometry, self.allocation, self.block_size = geometry, allocation, block_size
        # heads share blocks and runs may be cut anywhere, so the peak alone decides
        self.num_blocks = -(-peak_tokens(geometry, allocation) // block_size)
        # Ranges of their own keep each head's slots together and are found fast. They need room for
        # the most of every head at once, which is more than the peak where sizes rise and fall.
        most = allocation.capacity(geometry).max(0)
        if most.sum(dtype=np.int64) <= self.num_blocks * block_size:
            self.pool = OwnRanges(most, block_size)
        else:
            self.pool = CommonSlots(self.num_blocks, block_size)
        scales, layers = geometry.schedule.num_scales, geometry.num_layers
        self.blocks_in_use = np.zeros((scales, layers), np.int64)
        self.write_slots = None
        by_regions = isinstance(allocation, RegionAllocation)
        runs = list(self._regions() if by_regions else self._static())
        # the last scale stores nothing: what the one before has left stays in use
        self.blocks_in_use[-1] = self.blocks_in_use[max(0, scales - 2), -1]
        self.ids, self.start, self.stop = self._as_table(runs[::-1])

    def _static(self) -> Iterator[Runs]:
        """Yields the runs that each scale reads, the last one first, of contents that are known."""
        g, last_use = self.geometry, self.allocation.last_use
        starts, shape = g.schedule.starts, (g.num_layers, g.num_heads, g.schedule.total_tokens)
        self.write_slots = slots = np.full(shape, -1, np.int32)
        owner = np.full(self.num_blocks * self.block_size, -1, np.int32)  # head of each slot
        for s in reversed(range(g.schedule.num_scales)):
            mine, before = slice(starts[s], starts[s] + g.schedule.tokens[s]), slice(starts[s])
            for layer in reversed(range(g.num_layers)):
                self.blocks_in_use[s, layer] = self.pool.blocks_in_use
                # the attention of the layer reads what is freed here, and the store comes after
                stored = slots[layer, :, mine]
                stored = stored[stored >= 0]
                self.pool.give(stored)
                owner[stored] = -1
                # Tokens that are there for longest come first, beside those that stay.
                head, token = np.nonzero(last_use[layer, :, before] == s)
                counts = np.bincount(head, minlength=g.num_heads)
                held = [own[own >= 0] for own in slots[layer, :, before]]
                found = self.pool.take(layer, counts, held)
                slots[layer, head, token] = found
                owner[found] = layer * g.num_heads + head
            yield self._live(owner)

    def _live(self, owner: np.ndarray) -> Runs:
        """Runs of all slots in use, head after head. owner: head of each slot, -1 for none."""
        slot = np.flatnonzero(owner >= 0)
        head = owner[slot]
        if (head[1:] < head[:-1]).any():  # not where heads have ranges of their own
            order = np.argsort(head, kind="stable")
            head, slot = head[order], slot[order]
        return self._runs(head, slot)

    def _regions(self) -> Iterator[Runs]:
        """Yields the runs that each scale reads, the last one first, of contents that the device
        decides. A region grows and shrinks at its end, so that a token in its remaining part never
        has to move."""
        g, capacity = self.geometry, self.allocation.region_capacity.astype(np.int64)
        regions = [[np.zeros(0, np.int64)] * g.num_heads for _ in range(g.num_layers)]
        for s in reversed(range(g.schedule.num_scales)):
            for layer, slots in reversed(list(enumerate(regions))):
                self.blocks_in_use[s, layer] = self.pool.blocks_in_use
                target = capacity[s, layer]
                # give first, then take: what some regions leave is free for others
                self.pool.give(np.concatenate([a[n:] for a, n in zip(slots, target, strict=True)]))
                slots[:] = (a[:n] for a, n in zip(slots, target, strict=True))
                more = target - [len(a) for a in slots]
                new = self.pool.take(layer, more, [a[-1:] for a in slots])
                new = np.split(new, np.cumsum(more)[:-1])
                slots[:] = map(np.concatenate, zip(slots, new, strict=True))
            flat = [slots for layer in regions for slots in layer]
            heads = np.repeat(np.arange(len(flat)), [len(slots) for slots in flat])
            yield self._runs(heads, np.concatenate(flat))

    # --- tables ---

    def _runs(self, head: np.ndarray, slot: np.ndarray) -> Runs:
        """Joins slots to runs of consecutive ones within a block. Slots come head after head."""
        first = np.ones(slot.size, bool)
        first[1:] = (np.diff(head) != 0) | (np.diff(slot) != 1) | (slot[1:] % self.block_size == 0)
        start = np.flatnonzero(first)
        block, offset = np.divmod(slot[start], self.block_size)
        return head[start], block, offset, offset + np.diff(np.append(start, slot.size))

    def _as_table(self, scales: list[Runs]) -> list[np.ndarray]:
        """Returns ids int32, start and stop uint8 [K, L, N, M]. Unused entries are empty."""
        g = self.geometry
        heads = g.num_layers * g.num_heads
        counts = [np.bincount(head, minlength=heads) for head, *_ in scales]
        most = max(int(count.max(initial=0)) for count in counts)
        if (entries := len(scales) * heads * most) > LARGEST_TABLE:
            raise UserError(
                f"in blocks of {self.block_size} the tables of this plan take {entries} entries, "
                f"at most {LARGEST_TABLE} can be planned: choose larger blocks (block_size) or a "
                f"smaller budget"
            )
        shape = (len(scales), heads, most)
        found = [np.zeros(shape, kind) for kind in (np.int32, np.uint8, np.uint8)]
        for s, ((head, *values), count) in enumerate(zip(scales, counts, strict=True)):
            # runs come head after head: the place of a run among those of its head
            place = np.arange(head.size) - np.repeat(np.cumsum(count) - count, count)
            for array, value in zip(found, values, strict=True):
                array[s, head, place] = value
        return [array.reshape(len(scales), g.num_layers, g.num_heads, most) for array in found]


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

    def take(self, layer: int, counts: np.ndarray, held: list[np.ndarray]) -> np.ndarray:
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

    def take(self, layer: int, counts: np.ndarray, held: list[np.ndarray]) -> np.ndarray:
        """Takes slots for the heads of a layer, head after head: free ones beside those that a head
        holds, a free run of the right length, blocks that nobody uses, the shortest free run that
        holds the rest, the longest runs.

        counts: int [N], how many slots each head gets.
        held: slots of each head, those first that it is to continue before others.
        """
        found = [np.zeros(0, np.int64)]
        for count, own in zip(counts.tolist(), held, strict=True):
            beside = self._beside(own) if count else []
            # Every run is another table entry, which kernels copy and look up.
            while count:
                block, first, end, forwards = self._room(count, beside)
                size = min(end - first, count)
                taken = np.arange(first, first + size) if forwards else np.arange(end - size, end)
                self._used[block, taken] = True
                left = [run for run in self._runs[block] if run != (first, end)]
                rest = (first + size, end) if forwards else (first, end - size)
                self._list(block, sorted([*left, rest]) if size < end - first else left)
                found.append(block * self._size + taken)
                count -= size
        return np.concatenate(found)

    def _beside(self, own: np.ndarray) -> list[tuple[int, int, int, bool]]:
        """Free runs beside these slots: block, first, end, whether they begin behind the slot."""
        block, place = np.divmod(own, self._size)
        found = {}
        for forwards, step, edge in ((True, 1, self._size - 1), (False, -1, 0)):
            inside = np.flatnonzero(place != edge)
            free = inside[~self._used[block[inside], place[inside] + step]]
            for i in free.tolist():
                b, x = int(block[i]), int(place[i]) + step
                first, end = next(run for run in self._runs[b] if run[0] <= x < run[1])
                if (b, first) not in found or found[b, first][0] > i:
                    found[b, first] = i, (b, first, end, forwards)
        return [run for _, run in sorted(found.values())]

    def _room(self, count: int, beside: list) -> tuple[int, int, int, bool]:
        """The free run to fill next, one less beside."""
        if beside:
            fitting = (run for run in beside if run[2] - run[1] >= count)
            run = next(fitting, None) or max(beside, key=lambda run: run[2] - run[1])
            beside.remove(run)
            return run
        at = bisect.bisect_left(self._by_length, (count, -1, -1))
        found = self._by_length[min(at, len(self._by_length) - 1)] if self._by_length else (0, 0, 0)
        if found[0] != count and self._whole:
            block = heapq.heappop(self._whole)
            self._list(block, [(0, self._size)])
            return block, 0, self._size, True
        size, block, first = found
        return block, first, first + size, True

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
