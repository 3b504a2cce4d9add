"""Masks that selections are made of, on models that draw scale by scale. Device functions over [R,
N, K] arrays; counts are per head and may be traced."""

from functools import reduce

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

from varjax.cache.observation import Observation

Score = Num[Array, "R N K"]
Mask = Bool[Array, "R N K"]
Position = Int[Array, "R N K"]
Count = Int[Array, "R N"]


def top(score: Score, among: Mask, count: Count) -> Mask:
    """The `count` best-scored entries of `among`; among equals the earlier entry comes first."""
    order = jnp.argsort(jnp.where(among, -score, jnp.inf), axis=-1, stable=True)
    return among & (jnp.argsort(order, axis=-1) < count[..., None])


def recent(position: Position, among: Mask, count: Count) -> Mask:
    """The `count` newest entries of `among`."""
    return top(position.astype(jnp.float32), among, count)


def stratified(score: Score, position: Position, among: Mask, count: Count, ratio: float) -> Mask:
    """Keeps `count` of `among` in two strata by age: the newer `ratio` of them is near, the rest is
    far.

    Each stratum keeps its best by score; near gets `ratio` of the count, far the rest, and
    what one cannot fill goes to the other.
    """
    total = among.sum(-1)
    near_size = jnp.ceil(ratio * total).astype(total.dtype)
    near = recent(position, among, near_size)
    far_size = total - near_size
    near_count = jnp.clip(jnp.round(ratio * count).astype(total.dtype), 0, near_size)
    near_count = jnp.maximum(near_count, jnp.minimum(count - far_size, near_size))
    return top(score, near, near_count) | top(score, among & ~near, count - near_count)


def part_of(count: Count, share: float) -> Count:
    """floor(share * count), not disturbed by float32's last digit (0.7 * 10 is 7)."""
    return jnp.floor(share * count + 1e-3).astype(count.dtype)


def max_pool(score: Score, width: int) -> Score:
    """Largest score within `width` (odd) neighbours, centred; nothing lies beyond the ends."""
    size, side = score.shape[-1], width // 2
    padded = jnp.pad(score, ((0, 0), (0, 0), (side, side)), constant_values=-jnp.inf)
    return reduce(jnp.maximum, (padded[..., i : i + size] for i in range(width)))


def window_and_peaks(obs: Observation, score: Score, width: int) -> Mask:
    """`obs.capacity` tokens: those of the observation window first (the best of them if not all
    fit), then the best others after max-pooling along the cache (stride 1, odd width).

    The cache is what is live, in order of position; dead entries have no place in it, window tokens
    have but count as -inf. Pooling makes plateaus of equal scores: within one, the higher own score
    comes first, then the earlier token.
    """
    kept, others = top(score, obs.live & obs.window, obs.capacity), obs.live & ~obs.window
    rest = obs.capacity - kept.sum(-1)
    order = jnp.argsort(jnp.where(obs.live, obs.position, jnp.iinfo(jnp.int32).max), axis=-1)
    own = jnp.take_along_axis(jnp.where(others, score, -jnp.inf), order, axis=-1)
    pooled = jnp.where(jnp.take_along_axis(others, order, axis=-1), max_pool(own, width), -jnp.inf)
    best_first = jnp.lexsort((-own, -pooled), axis=-1)
    place = jnp.argsort(jnp.take_along_axis(order, best_first, axis=-1), axis=-1)
    return kept | (others & (place < rest[..., None]))
