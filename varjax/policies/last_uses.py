"""Last uses that keep the most under a budget: a knapsack whose items grow from scale to scale.

An item is a token, or the tokens of a source scale, in one head of one layer. Keeping it up to
scale u gains what the scales behind its own up to u see in it, and takes its tokens in all of
them. After every store of every layer at most the budget may be held
(`allocator.after_each_store`): one row for each (scale, layer). So the last uses are independent
but for the rows, and prices of
the rows part them: at given prices every item takes its best last use alone.

Prices rise where a row is too full and fall where there is room, until everything fits. What they
leave over is filled by the best gains per token that still fit. On the embedded models this keeps
at least 99 % of the optimum of an integer programme (tests/policies/test_knapsack.py).

Letters: K scales, of which K - 1 store, L layers, N heads, X items of a head.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from varjax.core.allocator import after_each_store

STEPS, DAMPING, LARGEST_STEP = 120, 15, 0.5  # of the prices, which move by factors
RISE, RISES = 1.02, 400  # factors of all prices, where they leave no row too full
STARTS = 6  # the best solutions at prices, which are filled


def best_last_uses(
    gain: Float[np.ndarray, "K L N X"],
    source: Int[np.ndarray, " X"],
    size: Int[np.ndarray, " X"],
    limit: int,
    fixed: Bool[np.ndarray, " X"] | None = None,
) -> Int[np.ndarray, "L N X"]:
    """The last scale that sees each item, its own scale if none does: most gain for the room.

    gain: what scale s sees in an item, at least 0; not looked at up to the item's own scale.
    source: scale of each item, below K - 1. size: its tokens.
    limit: tokens that all heads of all layers may hold together after any store; the fixed items
      have to fit.
    fixed: items that are kept to the end.
    """
    later = (np.arange(len(gain))[:, None] > source)[:, None, None]
    problem = _Problem(np.where(later, gain, 0), later, source, size, limit, fixed)
    found = sorted(problem.at_prices(), key=problem.worth, reverse=True)[:STARTS]
    return max(map(problem.filled, found), key=problem.worth)


class _Problem:
    """Items and rows; a solution is the last use of every item, int [L, N, X]. The arguments are
    those of `best_last_uses`. later: bool [K, 1, 1, X], the scales behind an item's own."""

    def __init__(self, gain, later, source, size, limit, fixed):
        self.gain, self.later, self.source, self.size = gain, later, source, size
        self.limit, self.fixed = limit, fixed
        self.gained = np.cumsum(gain, 0)  # up to each scale

    def worth(self, last: Int[np.ndarray, "L N X"]) -> float:
        return float(np.take_along_axis(self.gained, last[None], 0).sum())

    def rows(self, last: Int[np.ndarray, "L N X"]) -> Int[np.ndarray, "stores L"]:
        """Tokens held right after each layer of each scale but the last has stored."""
        scales = np.arange(len(self.gain))[:, None, None, None]
        held = np.where((last >= scales) & self.later, self.size, 0).sum((-1, -2))
        return after_each_store(held)[:-1]  # the last scale stores nothing

    def chosen(self, prices: Float[np.ndarray, "stores L"]) -> Int[np.ndarray, "L N X"]:
        """The last uses that are best at these prices of the rows."""
        # what scale s sees is held from the store of its layer in scale s - 1 to that in scale s
        per_token, until = np.zeros(self.gain.shape[:2]), np.cumsum(prices, -1)
        per_token[1:] += until[:, -1:] - until + prices
        per_token[:-1] += until - prices
        cost = per_token[:, :, None, None] * self.size
        net = np.cumsum(np.where(self.later, self.gain - cost, 0), 0)
        best = np.where(net.max(0) > 0, net.argmax(0), self.source)
        return best if self.fixed is None else np.where(self.fixed, len(self.gain) - 1, best)

    def at_prices(self) -> list[Int[np.ndarray, "L N X"]]:
        """Solutions that fit, at prices on the way to those that fill the rows and a little
        above."""
        level = max(float(self.gain.mean()), 1e-12)
        prices, found = np.full((len(self.gain) - 1, self.gain.shape[1]), level), {}
        fixed = False if self.fixed is None else self.fixed
        least = np.broadcast_to(np.where(fixed, len(prices), self.source), self.gain.shape[1:])
        found[least.tobytes()] = least
        for step in range(STEPS + RISES):
            last = self.chosen(prices)
            excess = self.rows(last) / self.limit - 1
            if excess.max() <= 0:
                found[last.tobytes()] = last
                if step >= STEPS and len(found) >= STARTS:
                    break
            if step < STEPS:
                bounded = np.clip(excess, -LARGEST_STEP, LARGEST_STEP)
                prices = np.maximum(prices * np.exp(bounded / (1 + step / DAMPING)), 1e-12)
            else:
                prices = prices * RISE
        return list(found.values())

    def filled(self, last: Int[np.ndarray, "L N X"]) -> Int[np.ndarray, "L N X"]:
        """The solution with later last uses while some fit, best gain per token first."""
        last, room = last.copy(), self.limit - self.rows(last)
        while True:
            before = np.take_along_axis(self.gained, last[None], 0)
            begins = np.maximum(last, self.source) + 1
            until = np.arange(len(self.gain))[:, None, None, None]
            taken = self.size * np.maximum(until - begins + 1, 1)
            score = np.where(until > last, (self.gained - before) / taken, 0)
            candidates = np.flatnonzero(score > 0)
            order = candidates[np.argsort(-score.flat[candidates], kind="stable")]
            changed = False
            for scale, *item in zip(*np.unravel_index(order, score.shape), strict=True):
                changed |= self._extend(last, room, scale, tuple(item))
            if not changed:
                return last

    def _extend(self, last: np.ndarray, room: np.ndarray, scale: int, item: tuple) -> bool:
        """Keeps an item up to a scale if that is later and all rows have room for it."""
        begin, layer, tokens = last[item] + 1, item[0], self.size[item[-1]]
        # scale s sees what is held from this layer's store in scale s - 1 to the one in scale s
        parts = room[begin - 1 : scale, layer:], room[begin : scale + 1, :layer]
        if scale < begin or any(part.size and part.min() < tokens for part in parts):
            return False
        for part in parts:
            part -= tokens
        last[item] = scale
        return True
