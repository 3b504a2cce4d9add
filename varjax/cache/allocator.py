"""The register allocator of the block pool.

Lifetimes are known on the host: a block is taken when layer l of scale s stores its tokens and
returned when its last token dies. Freed blocks pass to any other layer or head, so the pool is the
peak of live blocks over all (scale, layer) events. Two steps: a *layout* places one head's tokens
into virtual blocks with lifetimes (equal heads share one layout), then `place` gives virtual blocks
real numbers.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from varjax.cache.allocation import Allocation, RegionAllocation, StaticAllocation
from varjax.geometry import Geometry
from varjax.schedule import Schedule


@dataclass(frozen=True, eq=False)
class HeadLayout:
    """One head's (or region's) blocks over time.

    born, dies: int [V]: virtual block v is taken by the store of scale born[v] and free again after
      the attention of scale dies[v] - 1.
    runs: per scale s, int [m, 3]: (virtual block, start, stop) of the slots visible at scale s.
    token_slot: int [tokens, 2]: (virtual block, offset), -1 if never stored; None where the device
      decides.
    """

    born: np.ndarray
    dies: np.ndarray
    runs: tuple[np.ndarray, ...]
    token_slot: np.ndarray | None = None

    def live_blocks(self, num_scales: int) -> np.ndarray:
        """int [K]: blocks held when each scale starts."""
        scale = np.arange(num_scales)[:, None]
        return ((self.born < scale) & (self.dies > scale)).sum(1)


def static_layout(death: np.ndarray, schedule: Schedule, block_size: int) -> HeadLayout:
    """Place tokens with known deaths [tokens]: the longest-lived go to the blocks that live
    longest."""
    slots: dict[
        int, np.ndarray
    ] = {}  # live virtual block -> death of the token in each slot, 0 if free
    born, dies = [], []
    token_slot = np.full((death.size, 2), -1, np.int32)
    runs = [np.zeros((0, 3), np.int32)]
    for s in range(schedule.num_scales - 1):
        for v in list(slots):
            slots[v][slots[v] == s + 1] = 0
            if not slots[v].any():
                dies[v] = s + 1
                del slots[v]
        new = np.arange(schedule.starts[s], schedule.ends[s])
        new = new[death[new] > s + 1]
        new = new[np.argsort(-death[new], kind="stable")]
        by_death = sorted(slots, key=lambda v: (-slots[v].max(), v))
        homes = [(v, offset) for v in by_death for offset in np.flatnonzero(slots[v] == 0)][
            : new.size
        ]
        while len(homes) < new.size:
            slots[len(born)] = np.zeros(block_size, death.dtype)
            homes += [
                (len(born), offset) for offset in range(min(block_size, new.size - len(homes)))
            ]
            born.append(s)
            dies.append(schedule.num_scales)
        for token, (v, offset) in zip(new, homes, strict=True):
            slots[v][offset] = death[token]
            token_slot[token] = v, offset
        runs.append(_runs(slots))
    return HeadLayout(np.array(born, int), np.array(dies, int), tuple(runs), token_slot)


def _runs(slots: dict[int, np.ndarray]) -> np.ndarray:
    """Contiguous occupied slots of every live block as rows (block, start, stop)."""
    rows = []
    for v in sorted(slots):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], slots[v] > 0, [0]]).astype(np.int8)))
        rows += [(v, a, b) for a, b in edges.reshape(-1, 2)]
    return np.array(rows, np.int32).reshape(-1, 3)


def region_layout(capacity: np.ndarray, block_size: int) -> HeadLayout:
    """A region that holds up to capacity[s] tokens at scale s, as a prefix of its blocks; it grows
    and shrinks at its end."""
    born, dies, runs = [], [], []
    stack: list[int] = []
    for s, tokens in enumerate(capacity):
        needed = -(-int(tokens) // block_size)
        while len(stack) > needed:
            dies[stack.pop()] = s
        while len(stack) < needed:
            stack.append(len(born))
            born.append(s - 1)
            dies.append(len(capacity))
        stops = np.clip(int(tokens) - np.arange(needed) * block_size, 0, block_size)
        runs.append(np.stack([stack, np.zeros(needed), stops], -1).astype(np.int32).reshape(-1, 3))
    return HeadLayout(np.array(born, int), np.array(dies, int), tuple(runs))


def layouts(allocation: Allocation, geometry: Geometry, block_size: int) -> list[list[HeadLayout]]:
    """Layout of every [layer][head]; equal heads share one object."""
    if isinstance(allocation, RegionAllocation):
        return _shared(
            np.moveaxis(allocation.region_capacity, 0, -1),
            lambda row: region_layout(row, block_size),
        )
    assert isinstance(allocation, StaticAllocation)
    return _shared(allocation.death, lambda row: static_layout(row, geometry.schedule, block_size))


def _shared(table: np.ndarray, make: Callable[[np.ndarray], HeadLayout]) -> list[list[HeadLayout]]:
    known: dict[bytes, HeadLayout] = {}
    result = []
    for layer in table:
        keys = [row.tobytes() for row in layer]
        for key, row in zip(keys, layer, strict=True):
            if key not in known:
                known[key] = make(row)
        result.append([known[key] for key in keys])
    return result


def after_each_store(per_layer: np.ndarray) -> np.ndarray:
    """int [K, L]: a quantity held by the whole cache right after layer l of scale s has stored.

    `per_layer` [K, L] is what each layer holds when scale s starts. Layers up to l already hold
    what scale s + 1 will see. The last scale stores nothing.
    """
    following = np.concatenate([per_layer[1:], per_layer[-1:]])
    done, waiting = np.cumsum(following, 1), np.cumsum(per_layer[:, ::-1], 1)[:, ::-1]
    return done + waiting - per_layer


def live_blocks(grid: list[list[HeadLayout]], num_scales: int) -> np.ndarray:
    """int [K, L]: blocks in use right after each store; the maximum is the size of the pool."""
    counts = {id(h): h.live_blocks(num_scales) for layer in grid for h in layer}
    return after_each_store(np.stack([sum(counts[id(h)] for h in layer) for layer in grid], 1))


def place(grid: list[list[HeadLayout]], num_scales: int) -> tuple[list[list[np.ndarray]], int]:
    """Give every virtual block a real number: ([layer][head] -> int [V], number of blocks in the
    pool)."""
    free: list[int] = []
    used = 0
    real = [[np.zeros(h.born.size, np.int32) for h in layer] for layer in grid]
    for s in range(num_scales - 1):
        for layer, numbers in zip(grid, real, strict=True):
            for head, mine in zip(layer, numbers, strict=True):
                for v in np.flatnonzero(head.dies == s + 1):
                    heapq.heappush(free, int(mine[v]))
            for head, mine in zip(layer, numbers, strict=True):
                for v in np.flatnonzero(head.born == s):
                    if not free:
                        heapq.heappush(free, used)
                        used += 1
                    mine[v] = heapq.heappop(free)
    return real, used
