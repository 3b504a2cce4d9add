"""Which pictures a step sees: a pure function of seed and step, so resuming needs no state."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def indices(count: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """int64 [batch_size]: pictures of step `step`; every epoch is a new permutation."""
    positions = step * batch_size + np.arange(batch_size)
    return np.array([_order(count, seed, int(p // count))[p % count] for p in positions])


def flips(batch_size: int, seed: int, step: int) -> np.ndarray:
    """bool [batch_size]: which pictures of the step are mirrored, each with probability 1/2."""
    return np.random.default_rng((seed, step, 1)).random(batch_size) < 0.5


def whole_batches(count: int, batch_size: int) -> Iterator[slice]:
    """Batches of one size in order, so that one program serves all; the rest is left out."""
    size = min(batch_size, count)
    return (slice(start, start + size) for start in range(0, count - size + 1, size))
