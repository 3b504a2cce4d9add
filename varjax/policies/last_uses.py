"""Last uses that keep the most under a budget: a knapsack whose items grow from scale to scale.

An item is a token, or the tokens of a source scale, in one head of one layer. Keeping it up to
scale u gains what the scales behind its own up to u see in it, and takes its tokens in all of
them. After every store of every layer at most the budget may be held
(`allocator.after_each_store`): one row for each (scale, layer). What scale s sees in layer l takes
consecutive rows, from the store of layer l in scale s - 1 to the one before it in scale s. So the
last uses are independent but for the rows, and prices of the rows part them: at given prices every
item takes its best last use alone.

Prices rise where a row is too full and fall where there is room, then all together until everything
fits; with many items first for a sample of them. What they leave over is filled by the best gains
per token that still fit; few items are searched at these prices. On the embedded models this keeps
at least 99.5 % of the optimum of an integer programme, from 5 % of the cache on
(tests/policies/test_knapsack.py).

Letters: K scales, of which K - 1 store, L layers, N heads, X items of a head.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from varjax.core.allocator import after_each_store

STEPS, DAMPING, LARGEST_STEP = 100, 15, 0.5  # of the prices, which move by factors
SAMPLE, LAST_STEPS = 48, 12  # items of a head and source in the sample; steps with all items
RISE, GROWTH = 0.002, 1.2  # of all prices together; the rise grows
# Of few items, one decides much. Searches: factors of all prices, states, last uses of an item,
# factor of lacking room's price; then how many with how many items, and their states.
FEW, FACTORS, BEAM, OPTIONS, DEARER = 300, (0.95, 1, 1.05), 1000, 4, 2
ROUNDS, SOME, BEAM_OF_SOME = 60, 50, 200
LISTED, TOGETHER = 20_000, 128  # extensions that filling looks at, and adds, at once


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
    scales, layers, heads, count = gain.shape
    fixed = np.zeros(count, bool) if fixed is None else fixed
    stored = np.bincount(source[fixed], size[fixed] * heads, scales).astype(np.int64)
    held = np.repeat((np.cumsum(stored) - stored)[:, None], layers, 1)
    room = limit - after_each_store(held)[:-1]
    if room.min() < 0:
        raise ValueError(f"the fixed items hold {limit - room.min()} tokens, more than {limit=}")
    last = np.full((layers, heads, count), scales - 1, np.int64)
    free = np.flatnonzero(~fixed)
    if free.size:
        free = free[np.argsort(source[free], kind="stable")]
        last[..., free] = _solution(_Problem.of(gain, source, size, free), room)
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
class _Group:
    """Items of one source scale. gained: [U, L, N, X], what a token has gained up to scale
    `source` + u. size: their tokens. items: where they lie in a solution."""

    source: int
    gained: np.ndarray
    size: np.ndarray
    items: slice


@dataclass(frozen=True)
class _Problem:
    """Items and rows. shape: K, L, N, X. A solution is the last use of every item, int8 [L, N, X],
    items in order of their source."""

    shape: tuple[int, int, int, int]
    groups: list[_Group]

    @classmethod
    def of(cls, gain, source, size, order) -> "_Problem":
        """The problem of the items `order`; the other arguments are those of `best_last_uses`."""
        groups, begin = [], 0
        for j in np.unique(source[order]).tolist():
            items = order[source[order] == j]
            gained = gain[j:, ..., items]  # a copy
            gained[0] = 0
            np.cumsum(gained, 0, out=gained)
            gained /= size[items].astype(gained.dtype)
            groups.append(_Group(j, gained, size[items], slice(begin, begin + items.size)))
            begin += items.size
        return cls((*gain.shape[:3], begin), groups)

    def sample(self) -> "_Problem":
        """Some items of every source, which stand for all of them."""
        groups, begin, rng = [], 0, np.random.default_rng(0)
        for group in self.groups:
            picked = rng.permutation(group.size.size)[:SAMPLE]
            size = group.size[picked] * (group.size.sum() / group.size[picked].sum())
            items = slice(begin, begin + picked.size)
            groups.append(_Group(group.source, group.gained[..., picked], size, items))
            begin += picked.size
        return _Problem((*self.shape[:3], begin), groups)

    def rows(self, last: Int[np.ndarray, "L N X"]) -> Float[np.ndarray, "stores L"]:
        """Tokens held right after each layer of each scale but the last has stored."""
        scales, layers = self.shape[:2]
        held = np.zeros((scales, layers))
        place = scales * np.arange(layers)[:, None, None]
        for group in self.groups:
            end = place + last[..., group.items]
            tokens = np.broadcast_to(group.size, end.shape).ravel()
            ended = np.bincount(end.ravel(), tokens, scales * layers).reshape(layers, scales).T
            held[group.source + 1 :] += ended[::-1].cumsum(0)[::-1][group.source + 1 :]
        return after_each_store(held)[:-1]  # the last scale stores nothing

    def chosen(self, prices: Float[np.ndarray, "stores L"]) -> Int[np.ndarray, "L N X"]:
        """The last uses that are best at these prices of the rows."""
        scales, layers, heads, count = self.shape
        before = np.concatenate([[0], np.cumsum(prices), np.full(layers - 1, prices.sum())])
        before = before.reshape(scales, layers)  # prices of all rows before a store
        last = np.empty((layers, heads, count), np.int8)
        for group in self.groups:
            j, part = group.source, np.full(group.gained.shape[1:], group.source, np.int8)
            best = np.zeros(part.shape, group.gained.dtype)
            for u in range(j + 1, scales):
                cost = (before[u] - before[j])[:, None, None].astype(best.dtype)
                net = group.gained[u - j] - cost
                better = net > best
                np.copyto(best, net, where=better)
                part[better] = u
            last[..., group.items] = part
        return last

    def extensions(self, last: np.ndarray, left: np.ndarray) -> list[np.ndarray]:
        """The best later last use of every item that fits by itself, best gain per token first:
        item, first row, row behind the last one, last use, tokens. left: [rows], their room."""
        scales, layers = self.shape[:2]
        room, parts = _room_until(left, scales, layers), []
        layer = np.arange(layers)[:, None, None]
        for group in self.groups:
            now = last[..., group.items]
            nearest = room[layer, now, np.minimum(now + 1, scales - 1)]
            at = np.nonzero((now < scales - 1) & (nearest >= group.size))
            begin, size = now[at].astype(np.int64), group.size[at[-1]]
            before = group.gained[(begin - group.source, *at)]
            score, until = np.zeros(begin.size, before.dtype), begin.copy()
            for u in range(group.source + 1, scales):
                rate = (group.gained[(u - group.source, *at)] - before) / np.maximum(u - begin, 1)
                better = (u > begin) & (room[at[0], begin, u] >= size) & (rate > score)
                score[better], until[better] = rate[better], u
            item = np.ravel_multi_index((*at[:2], at[2] + group.items.start), last.shape)
            first, behind = begin * layers + at[0], until * layers + at[0]
            parts.append(np.stack([score, item, first, behind, until, size]))
        found = np.concatenate(parts, 1)
        found = found[:, found[0] > 0]
        if found.shape[1] > LISTED:
            found = found[:, np.argpartition(-found[0], LISTED)[:LISTED]]
        return list(found[1:, np.argsort(-found[0], kind="stable")].astype(np.int64))


def _room_until(left: np.ndarray, scales: int, layers: int) -> Int[np.ndarray, "L K K"]:
    """The least room among the rows that an item of a layer takes anew if its last use becomes
    scale u instead of scale a: [L, a, u]."""
    most = np.iinfo(np.int64).max
    padded = np.concatenate([left, np.full(layers - 1, most)])  # nothing is stored there
    of_scale = np.lib.stride_tricks.sliding_window_view(padded, layers).min(-1)
    of_scale = of_scale.reshape(scales - 1, layers)
    room = np.full((layers, scales, scales), most)
    for a in range(scales - 1):
        room[:, a, a + 1 :] = np.minimum.accumulate(of_scale[a:], 0).T
    return room


def _solution(problem: _Problem, room: Int[np.ndarray, "stores L"]) -> np.ndarray:
    """The best solution found."""
    prices = _settled(problem, room)
    last = _filled(problem, _raised(problem, prices, room), room)
    if np.prod(problem.shape[1:]) <= FEW:
        last = _filled(problem, _searched(problem, last, prices, room), room)
    return last


def _settled(problem: _Problem, room: np.ndarray) -> Float[np.ndarray, "stores L"]:
    """Prices at which the rows are nearly full."""
    mean = np.mean([group.gained[-1].mean() / len(group.gained) for group in problem.groups])
    prices = np.full(room.shape, max(float(mean), 1e-12))
    sample = problem.sample()
    stages = [problem] * STEPS
    if sample.shape != problem.shape:
        stages = [sample] * STEPS + [problem] * LAST_STEPS
    for step, part in enumerate(stages):
        held = part.rows(part.chosen(prices))
        excess = np.clip(held / np.maximum(room, 1) - 1, -LARGEST_STEP, LARGEST_STEP)
        prices = np.maximum(prices * np.exp(excess / (1 + min(step, STEPS) / DAMPING)), 1e-12)
    return prices


def _raised(problem: _Problem, prices: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The solution at the first prices, all raised alike, that fits."""
    last, rise = problem.chosen(prices), RISE
    while (problem.rows(last) > room).any():
        prices, rise = prices * (1 + rise), rise * GROWTH
        last = problem.chosen(prices)
    return last


def _filled(problem: _Problem, last: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The solution with later last uses while some fit, best gain per token first."""
    last, left = last.copy(), (room - problem.rows(last)).astype(np.int64).ravel()
    while (found := problem.extensions(last, left))[0].size:
        for begin in range(0, found[0].size, TOGETHER):
            _extend(last, left, [a[begin : begin + TOGETHER] for a in found])
    return last


def _extend(last: np.ndarray, left: np.ndarray, found: list[np.ndarray]) -> None:
    """Makes those of the extensions, in their order, for which there is still room."""
    item, first, behind, until, size = found
    rows = np.arange(left.size)
    takes = ((first[:, None] <= rows) & (rows < behind[:, None])) * size[:, None]
    while item.size:
        alone = (takes <= left).all(1)
        item, until, takes = item[alone], until[alone], takes[alone]
        total = takes.cumsum(0)
        fits = (total <= left).all(1)
        count = fits.size if fits.all() else int(fits.argmin())  # the first too many; at least 1
        last.reshape(-1)[item[:count]] = until[:count]
        left -= takes[:count].sum(0)
        item, until, takes = item[count:], until[count:], takes[count:]


def _searched(
    problem: _Problem, last: np.ndarray, prices: np.ndarray, room: np.ndarray
) -> np.ndarray:
    """The solution after beam searches where they find a better one: for all items at several
    prices, then for some while the others stay. For few items: a table holds all their choices."""
    gained, takes = _choices(problem)
    every, rng = np.arange(len(gained)), np.random.default_rng(0)
    now = last.ravel().astype(np.int64)
    rounds = [(every, BEAM, factor) for factor in FACTORS]
    rounds += [(rng.permutation(every)[:SOME], BEAM_OF_SOME, 1) for _ in range(ROUNDS)]
    for free, width, factor in rounds:
        left = room.ravel() - takes[every, now].sum(0) + takes[free, now[free]].sum(0)
        new = _beam(gained[free], takes[free], factor * prices.ravel(), left, width)
        better = gained[free, new].sum() >= gained[free, now[free]].sum()
        if better and (takes[free, new].sum(0) <= left).all():
            now[free] = new
    return now.reshape(last.shape).astype(np.int8)


def _choices(problem: _Problem) -> tuple[np.ndarray, np.ndarray]:
    """What every item gains up to every last use, [I, K], and what it takes, [I, K, rows]."""
    scales, layers, *_ = problem.shape
    rows, layer = np.arange((scales - 1) * layers), np.arange(layers)[:, None, None, None, None]
    gained = np.full((*problem.shape[1:], scales), -np.inf)
    takes = np.zeros((*gained.shape, rows.size))
    for group in problem.groups:
        j, mine = group.source, np.s_[:, :, group.items, group.source :]
        gained[mine] = np.moveaxis(group.gained, 0, -1) * group.size[:, None]
        behind = np.arange(j, scales)[:, None] * layers + layer
        takes[mine] = (j * layers + layer <= rows) & (rows < behind)
        takes[mine] *= group.size[:, None, None]
    return gained.reshape(-1, scales), takes.reshape(-1, scales, rows.size)


def _beam(
    gained: np.ndarray, takes: np.ndarray, price: np.ndarray, room: np.ndarray, width: int
) -> Int[np.ndarray, " I"]:
    """The best solution of a beam search, which may not fit. It decides item by item, large ones
    first, so that small ones fill what these leave. The states stay that lose least: net gain
    against the best last uses at these prices, and the price of the room that would be left over
    if the other items took theirs; room that would lack is dearer."""
    every, lack = np.arange(len(gained)), DEARER * np.maximum(price, price.mean())
    net = gained - takes @ price
    likely = np.argsort(-net, 1, kind="stable")[:, :OPTIONS]
    best, loss = likely[:, 0], net.max(1, keepdims=True) - net
    left, lost, steps = (room - takes[every, best].sum(0))[None], np.zeros(1), []
    for i in np.lexsort((loss[every, likely[:, 1]], -takes[:, -1].max(1))):
        until = likely[i][np.isfinite(loss[i, likely[i]])]
        left = (left[:, None] + takes[i, best[i]] - takes[i, until]).reshape(-1, room.size)
        lost = (lost[:, None] + loss[i, until]).ravel()
        score = lost + np.maximum(left, 0) @ price - np.minimum(left, 0) @ lack
        kept = np.unique(score.astype(np.float32), return_index=True)[1][:width]  # best first
        left, lost = left[kept], lost[kept]
        steps.append((i, kept // until.size, until[kept % until.size]))
    state, last = int((left >= 0).all(1).argmax()), best.copy()  # the first that fits
    for i, parent, until in reversed(steps):
        last[i], state = until[state], parent[state]
    return last
