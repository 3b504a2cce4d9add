"""The pruning schedule of HeatKV: which head gives up which source scale, and when.

Letters: K scales, L layers, N heads, T = L * N, s sink scales. k is the scale being generated, j
the scale of stored tokens. A *unit* is what is removed at once: one source scale of a head, or all
scales of a head after the sinks; U counts the units of one head.
"""

import math
from dataclasses import dataclass

import numpy as np

from varjax.core.allocation import Geometry
from varjax.core.allocator import after_each_layer
from varjax.core.errors import UserError


@dataclass(frozen=True, eq=False)
class PruneSchedule:
    """The decisions of `prune_schedule`.

    removed: bool [K, K, L, N], G[k, j]: gone after scale k. The last scale repeats the one before.
    hidden: bool [K, K, L, N], A[k, j]: gone before scale k starts, so that k does not see it.
    early_count: int [K], removals due after scale k that had to come before it.
    """

    removed: np.ndarray
    hidden: np.ndarray
    early_count: np.ndarray

    def last_use(self) -> np.ndarray:
        """int [L, N, K]: the last scale that sees the tokens of scale j; j where none does."""
        scale = np.arange(len(self.hidden))
        later = (scale[:, None] > scale)[:, :, None, None]
        seen = (later & ~self.hidden).sum(0)
        return np.moveaxis(seen + scale[:, None, None], 0, -1)


def heads_to_remove(geometry: Geometry, sinks: int, budget: float) -> np.ndarray:
    """N_k, int [K]: the fewest heads that must fall back to their sinks for the cache to fit after
    scale k (HeatKV, Eq. 5)."""
    schedule, total = geometry.schedule, geometry.num_layers * geometry.num_heads
    allowed = budget * schedule.persistent_tokens
    protected = schedule.starts[sinks]
    counts = np.zeros(schedule.num_scales, np.int64)
    for k in range(sinks, schedule.num_scales - 1):
        if schedule.ends[k] > allowed:
            needed = total * (schedule.ends[k] - allowed) / (schedule.ends[k] - protected)
            counts[k] = min(total, math.ceil(needed))
    return counts


def prune_schedule(
    geometry: Geometry,
    orders: np.ndarray,
    *,
    sinks: int,
    budget: float,
    whole_heads: bool = False,
    literal: bool = False,
) -> PruneSchedule:
    """HeatKV, Algorithm 1: prefixes of the orders, and as few early removals as the budget allows.
    `UserError`: the sinks alone exceed the budget: the message names the smallest feasible one.

    Args:
      orders: int [S, T, 2], (head, layer), least needed first, for the source scales s to K - 2.
      whole_heads: `orders` is a single list of heads, and a removed head keeps its sinks only.
      literal: count the cache as Algorithm 2 is printed, where layers that have not run yet hold
        the current scale already.
    """
    lowest = geometry.schedule.starts[sinks] / max(1, geometry.schedule.persistent_tokens)
    if budget + 1e-12 < lowest:
        raise UserError(
            f"budget={budget:g} is infeasible: {sinks} sink scales alone need {lowest:.6g} of the "
            f"full cache, which is the smallest feasible budget"
        )
    counts = heads_to_remove(geometry, sinks, budget)
    size, rank, removed = _units(geometry, orders, counts, sinks, whole_heads)
    of_sinks = np.minimum((0, *geometry.schedule.ends), geometry.schedule.starts[sinks])
    limit = math.floor(budget * geometry.dense_tokens + 1e-6)  # 0.6 * 300 is 180, not less

    def held(row: int, gone: np.ndarray) -> np.ndarray:
        """int [L]: tokens that each layer stores in state `row`, given what is removed."""
        units = (~gone * size[row][:, None, None]).sum((0, 2))
        return units + geometry.num_heads * of_sinks[row]

    hidden, early = removed[1:].copy(), np.zeros(geometry.schedule.num_scales, np.int64)
    for k in range(geometry.schedule.num_scales - 1):
        row = k + 1 if literal else k
        base = after_each_layer(held(k + 1, removed[k + 1]), held(row, removed[k]))
        due = removed[k + 1] & ~removed[k]
        taken = _early_removals(base - limit, due, size[row], rank)
        hidden[k] = removed[k]
        hidden[k][taken] = True
        early[k] = len(taken[0])
    return PruneSchedule(
        _per_source_scale(removed[1:], sinks, own_scale=True),
        _per_source_scale(hidden, sinks, own_scale=False),
        early,
    )


def _units(
    geometry: Geometry, orders: np.ndarray, counts: np.ndarray, sinks: int, whole_heads: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(int [K + 1, U]: stored tokens of each unit; int [U, L, N]: its place in its order; bool [K +
    1, U, L, N]: whether it is removed). Row i is the state before scale i, after scale i - 1."""
    schedule, layers, heads = geometry.schedule, geometry.num_layers, geometry.num_heads
    source = np.arange(sinks, max(sinks, schedule.num_scales - 1))
    done = np.arange(-1, schedule.num_scales)[:, None]
    size = np.where(done >= source, np.array(schedule.tokens, np.int64)[source], 0)
    size = size.sum(1, keepdims=True) if whole_heads else size
    rank = np.zeros((len(orders), layers, heads), np.int64)
    for order, row in zip(orders, rank, strict=True):
        row[order[:, 1], order[:, 0]] = np.arange(len(order))
    due = np.concatenate([[0], counts])[:, None, None, None]
    removed = (rank < due) & (size > 0)[:, :, None, None]
    removed[-1] = removed[-2]
    return size, rank, removed


def _early_removals(
    excess: np.ndarray, due: np.ndarray, size: np.ndarray, rank: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Index arrays into [U, L, N]: the shortest prefix of the removals that are due - layer
    descending, source scale descending, rank ascending - that keeps every layer of a scale within
    the limit. Only removals in layers still to run free anything. excess: int [L], tokens above the
    limit without any."""
    unit, layer, head = np.nonzero(due & (size > 0)[:, None, None])
    first = np.lexsort((rank[unit, layer, head], -unit, -layer))
    unit, layer, head = unit[first], layer[first], head[first]
    freed = np.concatenate([[0], np.cumsum(size[unit])])
    in_later_layers = (layer > np.arange(len(excess))[:, None]).sum(1)
    needed = np.minimum(np.searchsorted(freed, excess), in_later_layers).max()
    return unit[:needed], layer[:needed], head[:needed]


def _per_source_scale(units: np.ndarray, sinks: int, own_scale: bool) -> np.ndarray:
    """bool [K, K, L, N] from units [K, U, L, N]: never sinks, the last scale, or later scales."""
    num_scales = len(units)
    scale = np.arange(num_scales)
    prunable = (scale >= sinks) & (scale < num_scales - 1)
    exists = scale[:, None] >= scale if own_scale else scale[:, None] > scale
    full = np.zeros((num_scales, num_scales, *units.shape[2:]), bool)
    if prunable.any():
        full[:, prunable] = units
    return full & (exists & prunable)[:, :, None, None]
