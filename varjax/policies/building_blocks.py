"""Masks that policies are made of. Device functions over [R, N, K] arrays; counts are per head and
may be traced."""

from functools import reduce

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


def rank(score: Num[Array, "R N K"], among: Bool[Array, "R N K"]) -> Int[Array, "R N K"]:
    """Place of each entry by descending score, counted within `among`; entries outside come last.
    Ties: earlier entry first."""
    order = jnp.argsort(jnp.where(among, -score, jnp.inf), axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def top(
    score: Num[Array, "R N K"], among: Bool[Array, "R N K"], count: Int[Array, "R N"]
) -> Bool[Array, "R N K"]:
    """The `count` best-scored entries of `among`."""
    return among & (rank(score, among) < count[..., None])


def recent(
    position: Int[Array, "R N K"], among: Bool[Array, "R N K"], count: Int[Array, "R N"]
) -> Bool[Array, "R N K"]:
    """The `count` newest entries of `among`."""
    return top(position.astype(jnp.float32), among, count)


def protect(
    position: Int[Array, "R N K"], among: Bool[Array, "R N K"], tokens: int
) -> Bool[Array, "R N K"]:
    """Entries of `among` that belong to the first `tokens` positions (the sink scales)."""
    return among & (position < tokens)


def stratified(
    score: Num[Array, "R N K"],
    position: Int[Array, "R N K"],
    among: Bool[Array, "R N K"],
    count: Int[Array, "R N"],
    ratio: float,
) -> Bool[Array, "R N K"]:
    """Keep `count` of `among` in two strata by age: the newer `ratio` of them is near, the rest is
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


def part_of(count: Int[Array, "R N"], share: float) -> Int[Array, "R N"]:
    """floor(share * count), not disturbed by float32's last digit (0.7 * 10 is 7)."""
    return jnp.floor(share * count + 1e-3).astype(count.dtype)


def peaks(
    score: Num[Array, "R N K"],
    position: Int[Array, "R N K"],
    live: Bool[Array, "R N K"],
    among: Bool[Array, "R N K"],
    count: Int[Array, "R N"],
    width: int,
) -> Bool[Array, "R N K"]:
    """The `count` best entries of `among` after max-pooling along the cache (stride 1, odd width).

    The cache is what is live, in order of position; dead entries have no place in it, live ones
    outside `among` have but count as -inf. Pooling makes plateaus of equal scores: within one, the
    higher own score comes first, then the earlier token.
    """
    order = jnp.argsort(jnp.where(live, position, jnp.iinfo(jnp.int32).max), axis=-1)
    own = jnp.take_along_axis(jnp.where(among, score, -jnp.inf), order, axis=-1)
    pooled = jnp.where(jnp.take_along_axis(among, order, axis=-1), max_pool(own, width), -jnp.inf)
    best_first = jnp.lexsort((-own, -pooled), axis=-1)
    place = jnp.argsort(jnp.take_along_axis(order, best_first, axis=-1), axis=-1)
    return among & (place < count[..., None])


def max_pool(score: Num[Array, "R N K"], width: int) -> Float[Array, "R N K"]:
    """Largest score within `width` (odd) neighbours, centred; nothing lies beyond the ends."""
    size, side = score.shape[-1], width // 2
    padded = jnp.pad(score, ((0, 0), (0, 0), (side, side)), constant_values=-jnp.inf)
    return reduce(jnp.maximum, (padded[..., i : i + size] for i in range(width)))


def window_and_peaks(
    score: Num[Array, "R N K"],
    position: Int[Array, "R N K"],
    live: Bool[Array, "R N K"],
    window: Bool[Array, "R N K"],
    count: Int[Array, "R N"],
    width: int,
) -> Bool[Array, "R N K"]:
    """`count` tokens: those of the observation window first (the best of them if not all fit), then
    the best others after pooling."""
    kept = top(score, live & window, count)
    others = live & ~window
    return kept | peaks(score, position, live, others, count - kept.sum(-1), width)
