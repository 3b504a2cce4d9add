"""The two algorithms of AMS-KV, on the host and as a device mask, and the sizes a budget buys.

A layer's capacity (the paper's C_bgt) is C_min, or C_max once the layer turned demanding. A scale
with more tokens than the capacity is oversize.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from varjax.cache.geometry import Geometry
from varjax.policies import building_blocks as blocks
from varjax.policies.base import Observation

POSITIONS = 2.0**21  # more than any token's position; a few times as much is exact in float32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens per head: C_min, C_max, and the condensed ones, which are locked.

    fill: of an oversize scale, the newest tokens that still fit are kept; otherwise none.
    """

    cmin: int
    cmax: int
    condensed: int
    fill: bool = False

    def contents(self, tokens: Sequence[int], below: Sequence[bool]) -> tuple[np.ndarray, list]:
        """Algorithm 1: (bool [K, sum of tokens], what a layer holds after each scale, the last one
        included; its capacity before each scale and after the last). below: whether each scale's
        similarity is below the threshold."""
        starts = np.cumsum([0, *tokens])
        retained = np.zeros((len(tokens), starts[-1]), bool)
        held, capacities = np.zeros(0, np.int64), [self.cmin]
        for i, count in enumerate(tokens):
            stored = self.fill or count <= self.cmax
            turns = stored and below[i] and held.size + count > capacities[-1]
            capacities.append(self.cmax if turns else capacities[-1])
            if stored:
                held = self._append(held, np.arange(starts[i], starts[i + 1]), capacities[-1])
            retained[i, held] = True
        return retained, capacities

    def _append(self, held: np.ndarray, own: np.ndarray, capacity: int) -> np.ndarray:
        """Algorithm 2 (CLRU): the condensed and the newest of both."""
        both = np.concatenate([held, own])
        if both.size <= capacity:
            return both
        if own.size <= capacity:
            return np.concatenate([both[: self.condensed], both[self.condensed - capacity :]])
        return np.concatenate([held, own[both.size - capacity :]]) if self.fill else held

    def wide(self, tokens: Sequence[int], below: np.ndarray) -> np.ndarray:
        """bool [L]: layers that end with C_max, from bool [L, K]."""
        return np.array([self.contents(tokens, row)[1][-1] == self.cmax for row in below])


def divide(
    geometry: Geometry, budget: float, demanding: int, least: int, ratio: float
) -> tuple[int, int]:
    """(C_min, C_max) of a budget: `demanding` layers hold `ratio` times as much as the others, as
    nearly as whole tokens and C_min >= `least` allow; together at most budget * F * L, and with
    budget 1 all of it."""
    full, layers = geometry.schedule.persistent_tokens, geometry.num_layers
    total, efficient = int(budget * full * layers + 1e-6), layers - demanding
    if not demanding or not efficient:
        return (total // layers,) * 2
    cmin = min(total // layers, max(least, round(total / (efficient + ratio * demanding))))
    cmax = (total - efficient * cmin) // demanding
    if cmax < full:
        return cmin, cmax
    return min(full, (total - demanding * full) // efficient), full


def divide_online(geometry: Geometry, budget: float, least: int, ratio: float) -> tuple[int, int]:
    """(C_min, C_max) when every layer must be able to hold C_max; C_min is at least `least`."""
    full = geometry.schedule.persistent_tokens
    cmax = int(budget * full + 1e-6)
    return (full if cmax == full else min(cmax, max(least, round(cmax / ratio)))), cmax


def keep(obs: Observation, capacity, condensed, fill):
    """bool [R, N, K]: what survives when a head may hold `capacity` int32 [R, N] tokens, of which
    `condensed` int32 [R, N] are locked, as `Sizes.contents` decides. fill: bool, traced."""
    own = obs.live & obs.own
    oversize = (own.sum(-1) > capacity)[..., None]
    among = obs.live & ~(own & oversize & ~fill)
    age = obs.position.astype(jnp.float32)
    locked = blocks.top(-age, among, condensed)
    stored_first = 1.0 * (~obs.own & oversize) + 2.0 * locked
    return blocks.top(age + stored_first * POSITIONS, among, capacity)
