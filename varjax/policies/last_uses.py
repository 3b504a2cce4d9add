"""Last uses that keep the most under a budget: a knapsack whose items grow from scale to scale.

An item is a token, or the tokens of a source scale, in one head of one layer. Keeping it up to
scale u gains what the scales behind its own up to u see in it, and takes its tokens in all of
them. After every store of every layer at most the budget may be held: one row for each (scale,
layer). What scale s sees in layer l takes consecutive rows, from the store of layer l in scale
s - 1 to the one before it in scale s. So the last uses are independent but for the rows, and prices
of the rows part them: at given prices every item takes its best last use alone.

Prices rise where a row is too full and fall where there is room; with many items first for a sample
of them. Then items take later last uses while they fit, those first that gain most for their
price. Few items are searched at these prices. On the embedded models this keeps at least 99.5 %
of the optimum of an integer programme, from 5 % of the cache on (tests/policies/test_knapsack.py).

Letters: K scales, of which K - 1 store, L layers, N heads, X items of a head, I free items.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

STEPS, DAMPING, LARGEST_STEP = 100, 15, 0.5  # of the prices, which move by factors
SAMPLE, LAST_STEPS = 20_000, 12  # items in the sample; steps with all items
SLICE, AT_ONCE = 2**17, 4096  # items, and later last uses of them, that are handled at once
# Of few items, one decides much. Searches: factors of all prices, states, last uses of an item,
# factor of lacking room's price; then how many with how many items, and their states.
FEW, FACTORS, BEAM, OPTIONS, DEARER = 300, (0.95, 1, 1.05), 1000, 4, 2
ROUNDS, SOME, BEAM_OF_SOME = 60, 50, 200


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
    prices = _settled(items, room)
    last = _filled(items, items.source, prices, room)
    if last.size <= FEW:
        last = _filled(items, _searched(items, last, prices, room), prices, room)
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


def _searched(
    items: _Items, last: np.ndarray, prices: np.ndarray, room: np.ndarray
) -> Int[np.ndarray, " I"]:
    """The solution after beam searches where they find a better one: for all items at several
    prices, then for some while the others stay."""
    every, rng, last = np.arange(last.size), np.random.default_rng(0), last.copy()
    rounds = [(every, BEAM, factor) for factor in FACTORS]
    rounds += [(rng.permutation(every)[:SOME], BEAM_OF_SOME, 1) for _ in range(ROUNDS)]
    for which, width, factor in rounds:
        part, now = items.some(which), last[which]
        left = room - items.rows(last) + part.rows(now)
        new = _beam(part, factor * prices, left, width)
        if part.worth(new) >= part.worth(now) and (part.rows(new) <= left).all():
            last[which] = new
    return last


def _beam(items: _Items, prices: np.ndarray, room: np.ndarray, width: int) -> Int[np.ndarray, " I"]:
    """The best solution of a beam search, which may not fit. It decides item by item, large ones
    first, so that small ones fill what these leave. The states stay that lose least: net gain
    against the best last uses at these prices, and the price of the room that would be left over
    if the other items took theirs; room that would lack is dearer."""
    net, lack = items.net(prices), DEARER * np.maximum(prices, prices.mean())
    likely = np.argsort(-net, 0, kind="stable")[:OPTIONS]
    loss = net.max(0) - np.take_along_axis(net, likely, 0)
    row = np.arange(room.size)[:, None, None]
    takes = ((items.row(items.source) <= row) & (row < items.row(likely))) * items.size
    left, lost, steps = (room - items.rows(likely[0]))[None], np.zeros(1), []
    for i in np.lexsort((loss[1], -items.size)):
        count = np.isfinite(loss[:, i]).sum()
        left = (left[:, None] + takes[:, 0, i] - takes[:, :count, i].T).reshape(-1, room.size)
        lost = (lost[:, None] + loss[:count, i]).ravel()
        score = lost + np.maximum(left, 0) @ prices - np.minimum(left, 0) @ lack
        kept = np.unique(score.astype(np.float32), return_index=True)[1][:width]  # best first
        left, lost = left[kept], lost[kept]
        steps.append((i, kept // count, kept % count))
    state, choice = int((left >= 0).all(1).argmax()), np.zeros_like(likely[:1])
    for i, parent, option in reversed(steps):
        choice[0, i], state = option[state], parent[state]
    return np.take_along_axis(likely, choice, 0)[0]
