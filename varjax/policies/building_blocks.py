"""Masks that policies are made of. Device functions over [R, N, K] arrays; counts are per head and
may be traced."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def rank(score: Float[Array, "R N K"], among: Bool[Array, "R N K"]) -> Int[Array, "R N K"]:
    """Place of each entry by descending score, counted within `among`; entries outside come last.
    Ties: earlier entry first."""
    order = jnp.argsort(jnp.where(among, -score, jnp.inf), axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def top(
    score: Float[Array, "R N K"], among: Bool[Array, "R N K"], count: Int[Array, "R N"]
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
    score: Float[Array, "R N K"],
    position: Int[Array, "R N K"],
    among: Bool[Array, "R N K"],
    count: Int[Array, "R N"],
    ratio: float,
) -> Bool[Array, "R N K"]:
    """Keep `count` of `among` in two strata by age: the newer `ratio` of them is near, the rest is
    far.

    Each stratum keeps its best by score; near gets `ratio` of the count, far the rest, and room
    that one cannot fill goes to the other.
    """
    total = among.sum(-1)
    near_size = jnp.ceil(ratio * total).astype(total.dtype)
    near = recent(position, among, near_size)
    far_size = total - near_size
    near_count = jnp.clip(jnp.round(ratio * count).astype(total.dtype), 0, near_size)
    near_count = jnp.maximum(near_count, jnp.minimum(count - far_size, near_size))
    return top(score, near, near_count) | top(score, among & ~near, count - near_count)
