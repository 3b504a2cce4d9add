"""Last uses that keep the most under a budget: a knapsack whose items grow from scale to scale.

An item is a token, or the tokens of a source scale, in one head of one layer. Keeping it up to
scale u gains what the scales behind its own up to u see in it, and takes its tokens in all of
them. After every store of every layer at most the budget may be held: one row for each (scale,
layer). What scale s sees in layer l takes consecutive rows, from the store of layer l in scale
s - 1 to the one before it in scale s. So the last uses are independent but for the rows, and prices
of the rows part them: at given prices every item takes its best last use alone.

Prices rise where a row is too full and fall where there is room; with many items first for a sample
of them. Then items take later last uses while they fit, those first that gain most for their
price. Where items are few, a fifth of them is dropped and refilled at moved prices, 100 times; the
best solution stays. On the embedded models this keeps at least 99 % of the optimum of an integer
programme, from 5 % of the cache on (tests/policies/test_knapsack.py).

Letters: K scales, of which K - 1 store, L layers, N heads, X items of a head, I free items.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

STEPS, DAMPING, LARGEST_STEP = 100, 15, 0.5  # of the prices, which move by factors
SAMPLE, LAST_STEPS = 20_000, 12  # items in the sample; steps with all items
SLICE, AT_ONCE = 2**17, 4096  # items, and later last uses of them, that are handled at once
# Of few items, one decides much: how often some are dropped, what share of them, and how far prices
# of rows move then (standard deviation of their logarithms).
FEW, ROUNDS, DROPPED, MOVED = 300, 100, 0.2, 0.6


def best_last_uses(
    gain: Float[np.ndarray, "K L N X"],
    source: Int[np.ndarray, " X"],
    size: Int[np.ndarray, " X"],
    limit: int,
    fixed: Bool[np.ndarray, " X"] | None = None,
) -> Int[np.ndarray, "L N X"]:
    """The last scale that sees each item, its own scale if none does: most gain for the room.

    gain: what scale s sees in an item, at least 0; not looked at up to the item's own scale.
      float32 takes half the memory.
    source: scale of each item, below K - 1. size: its tokens.
    limit: tokens that all heads of all layers may hold together after any store.
    fixed: items that are kept to the end. `ValueError` if these alone do not fit.
    """
    fixed = np.zeros(source.size, bool) if fixed is None else fixed
    last = np.full(gain.shape[1:], len(gain) - 1)
    room = limit - _Items.of(gain, source, size, fixed).rows(last[..., fixed].ravel())
    if room.min(initial=0) < 0:
        most = limit - int(room.min())
        raise ValueError(f"the fixed items hold {most} tokens, more than {limit=}")
    if not fixed.all():
        free = _Items.of(gain, source, size, ~fixed)
        last[..., ~fixed] = _solution(free, room).reshape(*last.shape[:2], -1)
    return last


def last_uses_of_heads(
    gain: Float[np.ndarray, "K L N X"], source: Int[np.ndarray, " X"], room: int
) -> Int[np.ndarray, "L N X"]:
    """The last stage that sees each item where every head has room for as many after every stage:
    those stay in which the stages to come see most together, the newest among equals.

    gain, source: as of `best_last_uses`.
    """
    worth = np.cumsum(gain[::-1], 0, dtype=np.float32)[::-1]
    last = np.broadcast_to(source, gain.shape[1:]).copy()
    kept = np.zeros(last.shape, bool)
    for stage in range(1 + int(source.min()), len(gain)):
        value = np.where(kept | (source == stage - 1), worth[stage], -1)
        best = np.argsort(value, -1, kind="stable")[..., max(0, value.shape[-1] - room) :]
        kept = np.zeros_like(kept)
        np.put_along_axis(kept, best, True, -1)
        kept &= value >= 0
        last[kept] = stage
    return last


@dataclass(frozen=True)
class _Items:
    """Items of all heads, one after the other. A solution is the last use of each, int [I].

    gained: up to every scale; -inf before the item's own. source, layer: int. size: their tokens.
    layers: of the model.
    """

    gained: Float[np.ndarray, "K I"]
    source: Int[np.ndarray, " I"]
    layer: Int[np.ndarray, " I"]
    size: Float[np.ndarray, " I"]
    layers: int

    @classmethod
    def of(cls, gain, source, size, which) -> "_Items":
        """The items `which`; the other arguments are those of `best_last_uses`."""
        gained = gain[..., which]  # a copy
        scale, source = np.arange(len(gain))[:, None, None, None], source[which].astype(np.int64)
        np.copyto(gained, 0, where=scale <= source)
        np.cumsum(gained, 0, out=gained)
        np.copyto(gained, -np.inf, where=scale < source)
        layer, _, item = (a.ravel() for a in np.indices(gained.shape[1:]))
        size = size[which].astype(gained.dtype)[item]
        return cls(gained.reshape(len(gain), -1), source[item], layer, size, gain.shape[1])

    def some(self, which: Int[np.ndarray, " J"]) -> "_Items":
        arrays = self.gained, self.source, self.layer, self.size
        return _Items(*(a[..., which] for a in arrays), self.layers)

    def row(self, scale: Int[np.ndarray, "*any I"]) -> Int[np.ndarray, "*any I"]:
        """Rows in which the items' layers store in `scale`: the first that the next scale takes."""
        return scale * self.layers + self.layer

    def rows(self, last: Int[np.ndarray, " I"]) -> Float[np.ndarray, " rows"]:
        """Tokens held right after each layer of each scale but the last has stored."""
        count = len(self.gained) * self.layers
        begun, ended = (np.bincount(self.row(u), self.size, count) for u in (self.source, last))
        return np.cumsum(begun - ended, dtype=np.float64)[: count - self.layers]

    def worth(self, last: Int[np.ndarray, " I"]) -> float:
        return float(self.gained[last, np.arange(last.size)].sum())

    def net(self, prices: Float[np.ndarray, " rows"]) -> Float[np.ndarray, "K I"]:
        """The gains at these prices of the rows; of every item up to a constant."""
        before = np.cumsum(np.pad(prices, (1, self.layers - 1))).reshape(-1, self.layers)
        net = before.astype(self.gained.dtype)[:, self.layer]
        net *= -self.size
        net += self.gained
        return net


def _solution(items: _Items, room: Float[np.ndarray, " rows"]) -> Int[np.ndarray, " I"]:
    """The best solution found."""
    prices, rng = _settled(items, room), np.random.default_rng(0)
    last = _filled(items, items.source, prices, room)
    for _ in range(ROUNDS if last.size <= FEW else 0):
        fewer = np.where(rng.random(last.size) < DROPPED, items.source, last)
        new = _filled(items, fewer, prices * np.exp(rng.normal(0, MOVED, prices.size)), room)
        if items.worth(new) > items.worth(last):
            last = new
    return last


def _settled(items: _Items, room: np.ndarray) -> Float[np.ndarray, " rows"]:
    """Prices at which the rows are nearly full."""
    sample = items.some(np.random.default_rng(0).permutation(items.size.size)[:SAMPLE])
    of_sample = room * (sample.size.sum() / items.size.sum())
    mean = items.gained[-1].sum() / (items.size.sum() * len(items.gained))
    prices = np.full(room.shape, max(float(mean), 1e-12))
    for step in range(STEPS):
        part, fits = (sample, of_sample) if step < STEPS - LAST_STEPS else (items, room)
        excess = part.rows(part.net(prices).argmax(0)) / np.maximum(fits, 1) - 1
        excess = np.clip(excess, -LARGEST_STEP, LARGEST_STEP)
        prices = np.maximum(prices * np.exp(excess / (1 + step / DAMPING)), 1e-12)
    return prices


def _filled(
    items: _Items, last: np.ndarray, prices: np.ndarray, room: np.ndarray
) -> Int[np.ndarray, " I"]:
    """The solution with later last uses that fit: those first that gain most for their price."""
    last, left = last.copy(), room - items.rows(last)
    which, until = _steps(items, last, prices)
    for start in range(0, which.size, AT_ONCE):
        some = slice(start, start + AT_ONCE)
        _take(items, last, left, which[some], until[some])
    return last


def _steps(
    items: _Items, last: np.ndarray, prices: np.ndarray
) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, " S"]]:
    """Items and later last uses of them: the corners of the upper hull of gain over price, by
    falling slope."""
    before = np.cumsum(np.pad(prices, (1, items.layers - 1))).reshape(-1, items.layers)
    scale, slopes, found = np.arange(len(before))[:, None], [], []
    for start in range(0, last.size, SLICE):
        which = np.arange(start, min(start + SLICE, last.size))
        points = items.gained[:, which], before[:, items.layer[which]] * items.size[which]
        now = last[which]
        while which.size:
            gain, price = (a - np.take_along_axis(a, now[None], 0) for a in points)
            slope = np.where(scale > now, gain, 0) / np.maximum(price, 1e-30)
            best, slope = slope.argmax(0), slope.max(0)
            rises = slope > 0
            which, now, points = which[rises], best[rises], [a[:, rises] for a in points]
            slopes.append(slope[rises])
            found.append(np.stack([which, now]).astype(np.int32))
    order = np.argsort(-np.concatenate(slopes), kind="stable")
    return tuple(np.concatenate(found, axis=1)[:, order])


def _take(
    items: _Items, last: np.ndarray, left: np.ndarray, which: np.ndarray, until: np.ndarray
) -> None:
    """Later last uses, `until`, of the items `which`, in `last`: all, or one by one those that fit.
    left: the room, of which they take what they need."""
    fit = _least(left, items.layers)[last[which], until, items.layer[which]] >= items.size[which]
    which, until = which[fit], until[fit]
    every, place = np.unique(which, return_inverse=True)
    part, wanted = items.some(every), last[every]
    np.maximum.at(wanted, place, until)
    taken = part.rows(wanted) - part.rows(last[every])
    if (taken <= left).all():
        left -= taken
        last[every] = wanted
        return
    row, size = items.layer[which] + items.layers * until, items.size[which]
    for i, scale, end, tokens in zip(which, until, row, size, strict=True):
        room = left[last[i] * items.layers + items.layer[i] : end]
        if room.size and room.min() >= tokens:
            room -= tokens
            last[i] = scale


def _least(left: Float[np.ndarray, " rows"], layers: int) -> Float[np.ndarray, "K K L"]:
    """The least room between the stores of each layer in a scale and in a later one."""
    one = np.pad(left, (0, layers - 1), constant_values=np.inf)
    one = np.lib.stride_tricks.sliding_window_view(one, layers).min(-1).reshape(-1, layers)
    least = np.full((1 + len(one), 1 + len(one), layers), np.inf)
    for scale in range(len(one)):
        least[scale, scale + 1 :] = np.minimum.accumulate(one[scale:], axis=0)
    return least
