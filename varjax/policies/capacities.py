"""Numbers of tokens that heads may hold, on the host, in whole numbers that keep to the budget.

A head's limit is an upper bound. Its capacity when a scale starts is the limit or, early on, what
exists. All limits together are at most floor(budget * F * L * N); with budget 1 every limit is F.
"""

import numpy as np

from varjax.core.allocation import Geometry

_HALVINGS = 100  # of the water level's interval: down to the last bit of a float64


def total(geometry: Geometry, budget: float) -> int:
    """Tokens that all heads of all layers may hold together."""
    return int(budget * geometry.dense_tokens + 1e-6)


def of_layer(geometry: Geometry, budget: float) -> int:
    """Tokens that the heads of a layer may hold together."""
    return int(budget * geometry.schedule.persistent_tokens * geometry.num_heads + 1e-6)


def uniform(geometry: Geometry, budget: float) -> int:
    """The limit of every head when all get the same."""
    return int(budget * geometry.schedule.persistent_tokens + 1e-6)


def capacity(geometry: Geometry, limits: np.ndarray | int) -> np.ndarray:
    """int32 [K, L, N]: tokens held when each scale starts, from limits that broadcast to it.

    A head cannot grow by more than one scale's tokens, even where its limit does.
    """
    schedule = geometry.schedule
    shape = (schedule.num_scales, geometry.num_layers, geometry.num_heads)
    limits = np.broadcast_to(limits, shape)
    held = np.zeros(shape, np.int32)
    for s in range(1, schedule.num_scales):
        held[s] = np.minimum(limits[s], held[s - 1] + schedule.tokens[s - 1])
    return held


def apportion(tokens: int, weights: np.ndarray, lower: int, upper: int) -> np.ndarray:
    """int64, shaped as `weights`: divide `tokens` in proportion to positive weights, each share
    between `lower` and `upper`.

    What a full share cannot take goes to the others in proportion (water-filling); fractions are
    rounded by largest remainder, the earlier entry first among equals. The sum is `tokens` exactly,
    as far as the bounds allow it.
    """
    flat = np.asarray(weights, np.float64).ravel()
    tokens = int(np.clip(tokens, lower * flat.size, upper * flat.size))
    low, level = 0.0, (upper + 1) / flat.min()
    for _ in range(_HALVINGS):  # of the factor at which clipped multiples add up to `tokens`
        middle = (low + level) / 2
        enough = np.clip(middle * flat, lower, upper).sum() >= tokens
        low, level = (low, middle) if enough else (middle, level)
    exact = np.clip(level * flat, lower, upper)
    shares = np.floor(exact + 1e-9).astype(np.int64)
    fraction = np.where(shares < upper, exact - shares, -1.0)
    for i in np.argsort(-fraction, kind="stable")[: max(0, tokens - shares.sum())]:
        shares[i] += 1
    return shares.reshape(np.shape(weights))


def image_slots(geometry: Geometry, budget: float, accounting: str) -> int:
    """Image tokens of a head that a budget pays for. With "bytes" the budget pays for all slots, so
    the condition's are subtracted. With "tokens" it pays for image tokens only; condition and
    buffer are extra."""
    sequence = geometry.schedule
    if accounting == "tokens":
        return int(budget * sequence.image_tokens + 1e-6)
    return int(budget * sequence.persistent_tokens + 1e-6) - sequence.condition
