"""The register allocator of the block pool.

Lifetimes are known on the host: a block is taken when layer l of scale s stores its tokens and
returned after the last use of its last token. Freed blocks pass to any other layer or head, so the
pool is the peak of live blocks over all (scale, layer) events. Two steps: a *layout* places one
head's tokens into virtual blocks with lifetimes (equal heads share one layout), then `place` gives
virtual blocks real numbers.
"""

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from varjax.cache.allocation import Allocation, Geometry, RegionAllocation, distinct
from varjax.errors import UserError
from varjax.schedule import Schedule

LARGEST_TABLE = 2**27  # entries: 0.8 GB


@dataclass(frozen=True, eq=False)
class HeadLayout:
    """One head's (or region's) blocks over time.

    stored_at, last_use: int [V]: virtual block v is taken by the store of scale stored_at[v] and
      free again after the attention of scale last_use[v].
    runs: per scale s, int [m, 3]: (virtual block, start, stop) of the slots visible at scale s.
    token_slot: int [tokens, 2]: (virtual block, offset), -1 if never stored; None where the device
      decides.
    """

    stored_at: np.ndarray
    last_use: np.ndarray
    runs: tuple[np.ndarray, ...]
    token_slot: np.ndarray | None = None

    def live_blocks(self, num_scales: int) -> np.ndarray:
        """int [K]: blocks held when each scale starts."""
        scale = np.arange(num_scales)[:, None]
        return ((self.stored_at < scale) & (self.last_use >= scale)).sum(1)


def static_layout(last_use: np.ndarray, schedule: Schedule, block_size: int) -> HeadLayout:
    """Place tokens with known last uses [tokens]: those used longest go to the blocks that are used
    longest, so that blocks empty as a whole."""
    most = sum(-(-t // block_size) for t in schedule.tokens)
    # last use of the token in each slot, 0 if free: what is stored is used after scale 0
    slots = np.zeros((most, block_size), last_use.dtype)
    stored_at, block_use = np.zeros(most, int), np.full(most, schedule.num_scales - 1)
    token_slot = np.full((last_use.size, 2), -1, np.int32)
    live, used = np.zeros(0, int), 0
    runs = [np.zeros((0, 3), np.int32)]
    for s in range(schedule.num_scales - 1):
        content = slots[live]
        content[content == s] = 0
        slots[live] = content
        # Blocks that are empty now go back before this scale's tokens are placed: the attention of
        # the layer has read them, and the store comes after it.
        emptied = ~content.any(1)
        block_use[live[emptied]] = s
        live = live[~emptied]
        new = np.arange(schedule.starts[s], schedule.ends[s])
        new = new[last_use[new] > s]
        # Longest-used first, into the free slots of the longest-used blocks: tokens that end
        # together end up together, and their blocks become free as a whole.
        new = new[np.argsort(-last_use[new], kind="stable")]
        block, offset = _free_slots(slots, live, new.size)
        fresh = np.arange(new.size - block.size)
        block = np.concatenate([block, used + fresh // block_size])
        offset = np.concatenate([offset, fresh % block_size])
        added = -(-fresh.size // block_size)
        stored_at[used : used + added] = s
        live, used = np.concatenate([live, np.arange(used, used + added)]), used + added
        slots[block, offset] = last_use[new]
        token_slot[new] = np.stack([block, offset], -1)
        runs.append(_runs(slots[live], live))
    return HeadLayout(stored_at[:used], block_use[:used], tuple(runs), token_slot)


def _free_slots(slots: np.ndarray, live: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """(block, offset) of at most `wanted` free slots of live blocks, those used longest first."""
    by_last_use = live[np.lexsort((live, -slots[live].max(1, initial=0)))]
    row, offset = np.nonzero(slots[by_last_use] == 0)
    return by_last_use[row[:wanted]], offset[:wanted]


def _runs(content: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Contiguous occupied slots of every live block as rows (block, start, stop)."""
    edges = np.diff(np.pad(content > 0, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row, start = np.nonzero(edges == 1)
    return np.stack([live[row], start, np.nonzero(edges == -1)[1]], -1).astype(np.int32)


@lru_cache(maxsize=1 << 12)
def static_live_blocks(last_uses: bytes, num_scales: int, block_size: int) -> np.ndarray:
    """int [K]: what `static_layout` followed by `live_blocks` gives, without placing tokens.

    `last_uses` are the bytes of int32 [K, K], tokens of a scale by last use. Blocks of equal
    content with consecutive numbers are one group (first number, how many, {last use: tokens});
    searching for a budget asks for many heads, most of them seen before.
    """
    counts = np.frombuffer(last_uses, np.int32).reshape(num_scales, -1)
    groups: list[tuple[int, int, dict[int, int]]] = []
    live, used = np.zeros(num_scales, int), 0
    for s in range(num_scales - 1):
        dropped = [(v, n, {u: c for u, c in held.items() if u > s}) for v, n, held in groups]
        groups = sorted((g for g in dropped if g[2]), key=lambda g: (-max(g[2]), g[0]))
        new = [[u, int(counts[s, u])] for u in range(num_scales - 1, s, -1) if counts[s, u]]
        groups = [part for group in groups for part in _fill(*group, new, block_size)]
        added = -(-sum(c for _, c in new) // block_size)
        groups += _fill(used, added, {}, new, block_size)
        used += added
        live[s + 1] = sum(n for _, n, _ in groups)
    live.setflags(write=False)
    return live


def _fill(first: int, n: int, held: dict[int, int], new: list[list[int]], block_size: int) -> list:
    """Put tokens ([last use, how many], consumed) into `n` equal blocks; the groups that result."""
    free, result = block_size - sum(held.values()), []
    while n and free and new:
        whole = new[0][1] // free
        blocks, content, space = min(n, max(1, whole)), dict(held), free
        while space and new:
            last_use, tokens = new[0]
            taken = min(space, tokens)
            content[last_use] = content.get(last_use, 0) + taken
            new[0][1] -= taken * (blocks if whole else 1)
            space -= taken
            if not new[0][1]:
                new.pop(0)
        result.append((first, blocks, content))
        first, n = first + blocks, n - blocks
    return result + ([(first, n, held)] if n else [])


def region_layout(capacity: np.ndarray, block_size: int) -> HeadLayout:
    """A region that holds up to capacity[s] tokens at scale s, as a prefix of its blocks; it grows
    and shrinks at its end."""
    stored_at, last_use, runs = [], [], []
    stack: list[int] = []
    for s, tokens in enumerate(capacity):
        # a stack: a region grows and shrinks at its end, so what stays never changes its slot
        needed = -(-int(tokens) // block_size)
        while len(stack) > needed:
            last_use[stack.pop()] = s - 1
        while len(stack) < needed:
            stack.append(len(stored_at))
            stored_at.append(s - 1)
            last_use.append(len(capacity) - 1)
        stops = np.clip(int(tokens) - np.arange(needed) * block_size, 0, block_size)
        runs.append(np.stack([stack, np.zeros(needed), stops], -1).astype(np.int32).reshape(-1, 3))
    return HeadLayout(np.array(stored_at, int), np.array(last_use, int), tuple(runs))


def layouts(allocation: Allocation, geometry: Geometry, block_size: int) -> list[list[HeadLayout]]:
    """Layout of every [layer][head]; equal heads share one object. `UserError` if the tables would
    be too large."""
    known: dict[bytes, HeadLayout] = {}
    by_regions = isinstance(allocation, RegionAllocation)
    places = geometry.schedule.num_scales * geometry.num_layers * geometry.num_heads

    def layout(row: np.ndarray) -> HeadLayout:
        if (key := row.tobytes()) not in known:
            if by_regions:
                known[key] = region_layout(row, block_size)
            else:
                known[key] = static_layout(row, geometry.schedule, block_size)
            entries = places * max(len(runs) for runs in known[key].runs)
            if entries > LARGEST_TABLE:
                raise UserError(
                    f"in blocks of {block_size} the tables of this plan take {entries} entries or "
                    f"more, at most {LARGEST_TABLE} can be planned: choose larger blocks "
                    f"(block_size, or accounting=tokens) or a smaller budget"
                )
        return known[key]

    table = np.moveaxis(allocation.region_capacity, 0, -1) if by_regions else allocation.last_use
    return [[layout(row) for row in layer] for layer in table]


def after_each_store(per_layer: np.ndarray) -> np.ndarray:
    """int [K, L]: a quantity held by the whole cache right after layer l of scale s has stored.

    `per_layer` [K, L] is what each layer holds when scale s starts. Layers up to l already hold
    what scale s + 1 will see. The last scale stores nothing.
    """
    return after_each_layer(np.concatenate([per_layer[1:], per_layer[-1:]]), per_layer)


def after_each_layer(done: np.ndarray, waiting: np.ndarray) -> np.ndarray:
    """int [..., L]: layers up to l hold `done`, later ones still `waiting`."""
    return np.cumsum(done, -1) + waiting.sum(-1, keepdims=True) - np.cumsum(waiting, -1)


def live_blocks(grid: list[list[HeadLayout]], num_scales: int) -> np.ndarray:
    """int [K, L]: blocks in use right after each store; the maximum is the size of the pool."""
    counts = {id(h): h.live_blocks(num_scales) for layer in grid for h in layer}
    return after_each_store(np.stack([sum(counts[id(h)] for h in layer) for layer in grid], 1))


def peak_blocks(allocation: Allocation, geometry: Geometry, block_size: int) -> int:
    """The size of the pool, without laying it out."""
    num_scales = geometry.schedule.num_scales
    if isinstance(allocation, RegionAllocation):
        blocks = -(-allocation.region_capacity.astype(np.int64) // block_size)
        return int(after_each_store(blocks.sum(-1)).max(initial=0))
    counts = distinct(allocation.tokens_by_last_use(geometry))
    live = [
        [static_live_blocks(head.tobytes(), num_scales, block_size) for head in layer]
        for layer in counts
    ]
    shape = (geometry.num_layers, geometry.num_heads, num_scales)
    layers = np.broadcast_to(np.array(live), shape).sum(1)
    return int(after_each_store(layers.T).max(initial=0))


def place(grid: list[list[HeadLayout]], num_scales: int) -> tuple[list[list[np.ndarray]], int]:
    """Give every virtual block a real number: ([layer][head] -> int [V], number of blocks in the
    pool)."""
    # A heap hands out the lowest free number first, so the pool is as short as the peak, and a
    # block that one layer frees is taken by the next layer of the same scale.
    free: list[int] = []
    used = 0
    real = [[np.zeros(h.stored_at.size, np.int32) for h in layer] for layer in grid]
    shared = {id(head): head for layer in grid for head in layer}.items()
    scales = range(num_scales - 1)
    # equal heads share their layout: what is freed and taken at each scale is looked up once
    freed = {i: [np.flatnonzero(head.last_use == s) for s in scales] for i, head in shared}
    taken = {i: [np.flatnonzero(head.stored_at == s) for s in scales] for i, head in shared}
    for s in scales:
        for layer, numbers in zip(grid, real, strict=True):
            # free before taking: within a layer the attention has read what is freed here
            for head, mine in zip(layer, numbers, strict=True):
                for number in mine[freed[id(head)][s]].tolist():
                    heapq.heappush(free, number)
            for head, mine in zip(layer, numbers, strict=True):
                blocks = taken[id(head)][s]
                again = [heapq.heappop(free) for _ in range(min(len(free), len(blocks)))]
                fresh = len(blocks) - len(again)  # no lower number is free: the next ones in order
                mine[blocks[: len(again)]] = again
                mine[blocks[len(again) :]] = np.arange(used, used + fresh)
                used += fresh
    return real, used
