"""Slots of the pool: which token of which head lies where, and when.

Lifetimes are known on the host: a slot is taken when layer l of scale s stores its tokens and free
again after the attention of the last scale that reads it. Freed slots pass to any layer or head, so
the pool is the peak of live tokens over all (scale, layer) events, rounded up to one block.

Kernels copy whole blocks, so a head fills its own as long as there are free ones. At the peak what
they have left over is shared: a table entry is a block and the run of slots in it that is meant.
"""

import bisect
import heapq
from collections.abc import Iterator

import numpy as np

from varjax.cache.allocation import Allocation, Geometry, RegionAllocation
from varjax.errors import UserError

LARGEST_TABLE = 2**27  # entries: 0.8 GB
Run = tuple[int, int, int]  # block, first slot, last slot + 1


def after_each_store(per_layer: np.ndarray) -> np.ndarray:
    """int [K, L]: a quantity held by the whole cache right after layer l of scale s has stored.

    `per_layer` [K, L] is what each layer holds when scale s starts. Layers up to l already hold
    what scale s + 1 will see. The last scale stores nothing.
    """
    return after_each_layer(np.concatenate([per_layer[1:], per_layer[-1:]]), per_layer)


def after_each_layer(done: np.ndarray, waiting: np.ndarray) -> np.ndarray:
    """int [..., L]: layers up to l hold `done`, later ones still `waiting`."""
    return np.cumsum(done, -1) + waiting.sum(-1, keepdims=True) - np.cumsum(waiting, -1)


def peak_tokens(geometry: Geometry, allocation: Allocation) -> int:
    """Most tokens that are live at any time (one row)."""
    held = allocation.capacity(geometry).sum(-1, dtype=np.int64)
    return int(after_each_store(held).max(initial=0))


class SlotPool:
    """Which slots of so many blocks are free. There must be enough of them for what is taken."""

    def __init__(self, blocks: int, block_size: int):
        self.block_size = block_size
        self._used = np.zeros((blocks, block_size), bool)
        self._whole = list(range(blocks))  # a heap: the lowest number first
        self._runs: dict[int, list[tuple[int, int]]] = {}  # free runs of blocks that are in use
        self._by_length: list[tuple[int, int, int]] = []  # (length, block, first) of the same

    @property
    def blocks_in_use(self) -> int:
        return len(self._used) - len(self._whole)

    def take(self, count: int, after: Run | None = None) -> list[Run]:
        """Runs of `count` slots in all: behind `after` as far as there is room, in blocks that
        nobody uses, in the shortest free run that the rest fits, in the longest ones."""
        found: list[Run] = []
        while count:
            if after is not None and (room := self._room_behind(after)):
                run = self._cut(after[0], after[2], min(room, count))
            elif self._whole:
                run = self._open(min(count, self.block_size))
            elif (i := bisect.bisect_left(self._by_length, (count, -1, -1))) < len(self._by_length):
                _, block, first = self._by_length[i]
                run = self._cut(block, first, count)
            else:
                length, block, first = self._by_length[-1]
                run = self._cut(block, first, length)
            found.append(run)
            count, after = count - (run[2] - run[1]), None
        return found

    def _room_behind(self, run: Run) -> int:
        """Free slots right behind a run, in its block."""
        free = (b - a for a, b in self._runs.get(run[0], ()) if a == run[2])
        return next(free, 0)

    def _open(self, count: int) -> Run:
        """The first slots of a block that nobody uses."""
        block = heapq.heappop(self._whole)
        self._list(block, [(0, self.block_size)])
        return self._cut(block, 0, count)

    def _cut(self, block: int, first: int, count: int) -> Run:
        """Take the first `count` slots of a free run."""
        self._used[block, first : first + count] = True
        left = [(a + count if a == first else a, b) for a, b in self._runs[block]]
        self._list(block, [(a, b) for a, b in left if a < b])
        return block, first, first + count

    def give(self, blocks: np.ndarray, offsets: np.ndarray) -> None:
        """Free slots."""
        self._used[blocks, offsets] = False
        for block in np.unique(blocks).tolist():
            used = self._used[block]
            if used.any():
                self._list(block, _runs_of(~used))
            else:
                self._list(block, [])
                heapq.heappush(self._whole, block)

    def _list(self, block: int, runs: list[tuple[int, int]]) -> None:
        """These are the free runs of a block from now on."""
        for a, b in self._runs.pop(block, ()):
            del self._by_length[bisect.bisect_left(self._by_length, (b - a, block, a))]
        for a, b in runs:
            bisect.insort(self._by_length, (b - a, block, a))
        if runs:
            self._runs[block] = runs


def _runs_of(mask: np.ndarray) -> list[tuple[int, int]]:
    """(first, last + 1) of the runs of true values."""
    edges = np.diff(np.pad(mask, 1).astype(np.int8))
    first, last = (np.flatnonzero(edges == step).tolist() for step in (1, -1))
    return list(zip(first, last, strict=True))


def _slots_of(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """(blocks, offsets) of all slots of some runs, in order."""
    lengths = [b - a for _, a, b in runs]
    blocks = np.repeat([block for block, *_ in runs], lengths).astype(np.int32)
    offsets = [np.arange(a, b, dtype=np.int32) for _, a, b in runs]
    return blocks, np.concatenate(offsets) if offsets else np.zeros(0, np.int32)


# --- contents that are known ----------------------------------------------------------------------


class Layout:
    """What `build_plan` needs: tables int [K, L, N, M] of the slots that a scale reads, block ids,
    first and last slot + 1; `write_slots` int32 [L, N, tokens], -1: never stored, None where the
    device decides; `blocks_in_use` int [K, L], right after each store."""

    def __init__(self, geometry: Geometry, allocation: Allocation, block_size: int):
        self.geometry, self.allocation, self.block_size = geometry, allocation, block_size
        self.num_blocks = -(-peak_tokens(geometry, allocation) // block_size)
        self.pool = SlotPool(self.num_blocks, block_size)
        scales, layers = geometry.schedule.num_scales, geometry.num_layers
        self.blocks_in_use = np.zeros((scales, layers), np.int64)
        self.write_slots = None
        by_regions = isinstance(allocation, RegionAllocation)
        tables = self._regions() if by_regions else self._static()
        self.ids, self.start, self.stop = self._joined(list(tables))

    def _static(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Tables of every scale, contents placed by their last use."""
        g, last_use, size = self.geometry, self.allocation.last_use, self.block_size
        shape = (g.num_layers, g.num_heads, g.schedule.total_tokens)
        self.write_slots = slots = np.full(shape, -1, np.int32)
        newest: dict[tuple[int, int], Run] = {}  # of each head
        yield self._table(np.zeros(shape, bool))
        for s in range(g.schedule.num_scales - 1):
            mine = slice(g.schedule.starts[s], g.schedule.ends[s])
            for layer in range(g.num_layers):
                # the attention of the layer has read what is freed here, and the store comes after
                gone = slots[layer][(last_use[layer] == s) & (slots[layer] >= 0)]
                if gone.size:
                    self.pool.give(gone // size, gone % size)
                for n in range(g.num_heads):
                    stays = _longest_first(last_use[layer, n, mine], s)
                    runs = self.pool.take(stays.size, newest.get((layer, n)))
                    blocks, offsets = _slots_of(runs)
                    slots[layer, n, mine][stays] = blocks * size + offsets
                    if runs:
                        newest[layer, n] = runs[-1]
                self.blocks_in_use[s, layer] = self.pool.blocks_in_use
            yield self._table((last_use > s) & (slots >= 0))
        self.blocks_in_use[-1] = self.pool.blocks_in_use

    def _table(self, seen: np.ndarray) -> tuple[np.ndarray, ...]:
        """(head, block, first, last + 1) of the runs that a scale reads, head after head."""
        head, token = np.nonzero(seen.reshape(-1, seen.shape[-1]))
        slot = self.write_slots.reshape(seen.shape[0] * seen.shape[1], -1)[head, token]
        order = np.lexsort((slot, head))
        head, slot = head[order], slot[order]
        first = np.ones(slot.size, bool)
        first[1:] = (np.diff(head) != 0) | (np.diff(slot) != 1) | (slot[1:] % self.block_size == 0)
        start = np.flatnonzero(first)
        length = np.diff(np.append(start, slot.size))
        block, offset = np.divmod(slot[start], self.block_size)
        return head[start], block, offset, offset + length

    # --- contents that the device decides ---

    def _regions(self) -> Iterator[tuple[np.ndarray, ...]]:
        """A region is a prefix of its slots; it grows and shrinks at its end, so that what stays
        never changes its slot."""
        g, capacity = self.geometry, self.allocation.region_capacity
        runs: list[list[list[Run]]] = [
            [[] for _ in range(g.num_heads)] for _ in range(g.num_layers)
        ]
        yield _table_of(runs)
        for s in range(g.schedule.num_scales - 1):
            for layer in range(g.num_layers):
                changes = capacity[s + 1, layer].astype(int) - capacity[s, layer]
                for region, change in zip(runs[layer], changes.tolist(), strict=True):
                    if change < 0:
                        self.pool.give(*_slots_of(_shorten(region, -change)))
                for region, change in zip(runs[layer], changes.tolist(), strict=True):
                    if change > 0:
                        _extend(region, self.pool.take(change, region[-1] if region else None))
                self.blocks_in_use[s, layer] = self.pool.blocks_in_use
            yield _table_of(runs)
        self.blocks_in_use[-1] = self.pool.blocks_in_use

    def _joined(self, tables: list[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
        """ids int32, start and stop uint8 [K, L, N, M]; entries that are not used are empty."""
        g = self.geometry
        heads = g.num_layers * g.num_heads
        counts = [np.bincount(head, minlength=heads) for head, *_ in tables]
        most = max(int(count.max(initial=0)) for count in counts)
        if (entries := len(tables) * heads * most) > LARGEST_TABLE:
            raise UserError(
                f"in blocks of {self.block_size} the tables of this plan take {entries} entries, "
                f"at most {LARGEST_TABLE} can be planned: choose larger blocks (block_size) or a "
                f"smaller budget"
            )
        shape = (len(tables), heads, most)
        found = [np.zeros(shape, kind) for kind in (np.int32, np.uint8, np.uint8)]
        for s, ((head, *values), count) in enumerate(zip(tables, counts, strict=True)):
            place = np.arange(head.size) - np.repeat(np.cumsum(count) - count, count)
            for array, value in zip(found, values, strict=True):
                array[s, head, place] = value
        return [array.reshape(len(tables), g.num_layers, g.num_heads, most) for array in found]


def _longest_first(last_use: np.ndarray, scale: int) -> np.ndarray:
    """Tokens that are stored after `scale`. Those used longest come first: tokens that end together
    end up together, and their blocks become free as a whole."""
    stays = np.flatnonzero(last_use > scale)
    return stays[np.argsort(-last_use[stays].astype(int), kind="stable")]


def _table_of(runs: list[list[list[Run]]]) -> tuple[np.ndarray, ...]:
    flat = [region for layer in runs for region in layer]
    head = np.repeat(np.arange(len(flat)), [len(region) for region in flat])
    entries = np.array([run for region in flat for run in region], int).reshape(-1, 3)
    return head, *entries.T


def _shorten(region: list[Run], count: int) -> list[Run]:
    """Take the last `count` slots away from a region; they are returned."""
    gone: list[Run] = []
    while count:
        block, first, last = region.pop()
        cut = max(first, last - count)
        gone.append((block, cut, last))
        count -= last - cut
        if cut > first:
            region.append((block, first, cut))
    return gone


def _extend(region: list[Run], runs: list[Run]) -> None:
    """Put slots behind those of a region."""
    for block, first, last in runs:
        if region and region[-1][0] == block and region[-1][2] == first:
            first = region.pop()[1]
        region.append((block, first, last))


def blocks_needed(geometry: Geometry, allocation: Allocation, block_size: int) -> int:
    """Blocks of the pool, without laying it out."""
    return -(-peak_tokens(geometry, allocation) // block_size)
