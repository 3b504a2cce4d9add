"""Masks that selections after a stage are made of, on models that draw token by token. Masks and
scores are [R, N, K] arrays over a head's slots, which hold tokens in no order; `obs.position` says
which token a slot holds. Among equal scores the older token is the lower.

Ranks come from comparing everything with everything (`pallas_kernels.rank`, in the implementation
that `obs` names); heads with very many slots sort instead. All of them give the same ranks.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from pallas_kernels.rank import rank as compared
from varjax.cache.observation import Observation
from varjax.policies.building_blocks import Count, Mask, Position, Score, max_pool

MOST_COMPARED = 1024  # slots; with more, comparisons cost more than two sorts


def age_rank(obs: Observation, among: Mask) -> Position:
    """The number of tokens of `among` older than each token, which need not be in `among`
    itself."""
    if obs.position.shape[-1] > MOST_COMPARED:
        return _rank_by_sorting(among, obs.position)
    return compared(None, obs.position, among, implementation=obs.implementation)


def rank(
    obs: Observation,
    score: Score,
    among: Mask,
    *,
    tie: Position | None = None,
    part: Mask | None = None,
) -> Position:
    """Counts the tokens of `among` with a lower score. Equal scores are ordered by `tie` (None: by
    position). With `part`, a token is compared only within its own part."""
    tie = obs.position if tie is None else tie
    if tie.shape[-1] > MOST_COMPARED:
        return _rank_by_sorting(among, score, tie, part=part)
    return compared(score, tie, among, part, implementation=obs.implementation)


def lowest(
    obs: Observation, score: Score, among: Mask, count: Count, *, tie: Position | None = None
) -> Mask:
    """The `count` tokens of `among` with the lowest scores; see `rank`."""
    return among & (rank(obs, score, among, tie=tie) < count[..., None])


def newest(obs: Observation, among: Mask, count: Count | int) -> Mask:
    """The `count` newest tokens of `among`."""
    total = among.sum(-1, dtype=jnp.int32)[..., None]
    count = jnp.broadcast_to(count, among.shape[:2])[..., None]
    return among & (age_rank(obs, among) >= total - count)


def tokens_needed(
    mass: Float[Array, "*heads C"],
    position: Int[Array, "*#heads C"],
    live: Bool[Array, "*#heads C"],
    threshold: float,
) -> Int[Array, "*heads"]:
    """The smallest m for which the newest m live tokens have at least `threshold` of the mass; more
    than there are if they have less together."""
    mass = jnp.where(live, mass, 0)
    if position.shape[-1] > MOST_COMPARED:
        order = jnp.argsort(jnp.where(live, -position, 1), axis=-1)
        gathered = jnp.cumsum(jnp.take_along_axis(mass, order, axis=-1), axis=-1)
        live = jnp.take_along_axis(live, order, axis=-1)
    else:
        as_new = position[..., None, :] >= position[..., None]
        gathered = jnp.where(as_new, mass[..., None, :], 0).sum(-1)
    return (live & (gathered < threshold)).sum(-1, dtype=jnp.int32) + 1


def by_age(
    obs: Observation, *values: Shaped[Array, "R N K ..."]
) -> tuple[Shaped[Array, "R N K ..."], ...]:
    """[R, N, K, ...] arrays with the live tokens first, oldest first."""
    place = _places(obs)
    slots = jnp.arange(place.shape[-1], dtype=jnp.int32)
    if place.shape[-1] > MOST_COMPARED:
        order = jnp.argsort(place, axis=-1)
    else:
        here = place[..., None, :] == slots[:, None]
        order = jnp.where(here, slots, 0).sum(-1, dtype=jnp.int32)
    return tuple(
        jnp.take_along_axis(v, order.reshape(*order.shape, *(1,) * (v.ndim - 3)), axis=2)
        for v in values
    )


def from_age(obs: Observation, value: Score) -> Score:
    """The inverse of `by_age`, for one array [R, N, K]."""
    return jnp.take_along_axis(value, _places(obs), axis=2)


def pooled(obs: Observation, score: Score, among: Mask, width: int) -> Score:
    """Largest score of `among` within `width` neighbours along the cache, in order of age: tokens
    that are live but not in `among` have a place there and count as -inf."""
    (ordered,) = by_age(obs, jnp.where(among, score, -jnp.inf))
    return from_age(obs, max_pool(ordered, width))


def _places(obs: Observation) -> Position:
    """A place for every slot: the live tokens by age, then the others as they lie."""
    others = jnp.cumsum(~obs.live, axis=-1, dtype=jnp.int32) - 1
    total = obs.live.sum(-1, dtype=jnp.int32, keepdims=True)
    return jnp.where(obs.live, age_rank(obs, obs.live), total + others)


def _rank_by_sorting(among: Mask, *keys: Num[Array, "R N K"], part: Mask | None = None) -> Position:
    """The same ranks as the comparisons give, by two sorts; the first key counts most."""
    if part is not None:  # where it is false first
        before = (among & ~part).sum(-1, keepdims=True, dtype=jnp.int32)
        in_order = _rank_by_sorting(among, part.astype(jnp.int32), *keys)
        return in_order - jnp.where(part, before, 0)
    order = jnp.lexsort((*reversed(keys), ~among), axis=-1)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)
