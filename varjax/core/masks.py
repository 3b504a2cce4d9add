"""Masks that selections are made of. Masks and scores are [R, N, K] arrays over the candidates of
an observation; counts are per head and may be traced.

The observation says which of equals stays, and how candidates are ranked. Scale by scale the
earlier candidate stays, and ranks come from sorting. Token by token the newer one stays
(`Observation.by_position`): a head's slots hold tokens in no order, `obs.position` says which.
Ranks then come from comparing everything with everything (`pallas_kernels.rank`, in the
implementation that `obs` names); heads with very many slots sort. All of them give the same ranks.
"""

from functools import reduce

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num, Shaped

from pallas_kernels.rank import rank as compared
from varjax.core.errors import UserError
from varjax.core.observation import Observation

Score = Num[Array, "R N K"]
Mask = Bool[Array, "R N K"]
Position = Int[Array, "R N K"]
Count = Int[Array, "R N"]

MOST_COMPARED = 1024  # slots; with more, comparisons cost more than two sorts


def top(obs: Observation, score: Score, among: Mask, count: Count) -> Mask:
    """The `count` best-scored candidates of `among`."""
    _check(score)
    if obs.by_position:
        return among & ~lowest(obs, score, among, among.sum(-1) - count)
    order = jnp.argsort(jnp.where(among, -score, jnp.inf), axis=-1, stable=True)
    return among & (jnp.argsort(order, axis=-1) < count[..., None])


def lowest(
    obs: Observation, score: Score, among: Mask, count: Count, *, tie: Position | None = None
) -> Mask:
    """The `count` candidates of `among` with the lowest scores; see `rank`."""
    return among & (rank(obs, score, among, tie=tie) < count[..., None])


def newest(obs: Observation, among: Mask, count: Count | int) -> Mask:
    """The `count` newest candidates of `among`."""
    if not obs.by_position:
        return top(obs, obs.position.astype(jnp.float32), among, count)
    total = among.sum(-1, dtype=jnp.int32)[..., None]
    count = jnp.broadcast_to(count, among.shape[:2])[..., None]
    return among & (age_rank(obs, among) >= total - count)


def oldest(obs: Observation, among: Mask, count: Count) -> Mask:
    """The `count` oldest candidates of `among`."""
    return top(obs, -obs.position, among, count)


def part_of(count: Count, share: float) -> Count:
    """floor(share * count), not disturbed by float32's last digit (0.7 * 10 is 7)."""
    return jnp.floor(share * count + 1e-3).astype(count.dtype)


# --- whole selections: `obs.capacity` live tokens ---


def fill(obs: Observation, kept: Mask, score: Score) -> Mask:
    """Fills the room that `kept` leaves with the best-scored others."""
    if obs.by_position:  # few leave: they are ranked, in place of those that stay
        surplus = obs.live.sum(-1) - obs.capacity
        return obs.live & ~lowest(obs, score, obs.live & ~kept, surplus)
    return kept | top(obs, score, obs.live & ~kept, obs.capacity - kept.sum(-1))


def first_and_newest(obs: Observation, number: Int[Array, ""] | int) -> Mask:
    """The first `number` tokens of the image, as far as there is room, and the newest others."""
    first = obs.live & (obs.position < number)
    if not obs.by_position:  # there always is room for them token by token
        first = oldest(obs, first, obs.capacity)
    return first | newest(obs, obs.live & ~first, obs.capacity - first.sum(-1))


def stratified(obs: Observation, score: Score, among: Mask, count: Count, ratio: float) -> Mask:
    """Keeps `count` of `among` in two strata by age: the newer `ratio` of them is near, the rest is
    far.

    Each stratum keeps its best by score; near gets `ratio` of the count, far the rest, and
    what one cannot fill goes to the other.
    """
    total = among.sum(-1)
    near_size = jnp.ceil(ratio * total).astype(total.dtype)
    near = newest(obs, among, near_size)
    far_size = total - near_size
    near_count = jnp.clip(jnp.round(ratio * count).astype(total.dtype), 0, near_size)
    near_count = jnp.maximum(near_count, jnp.minimum(count - far_size, near_size))
    best = top(obs, score, near, near_count)
    return best | top(obs, score, among & ~near, count - near_count)


def window_and_peaks(obs: Observation, score: Score, width: int) -> Mask:
    """Tokens of the observation window first (the best of them if not all fit), then the best
    others after max-pooling along the cache (stride 1, odd width).

    The cache is what is live, in order of position; dead candidates have no place in it, window
    tokens have but count as -inf. Pooling makes plateaus of equal scores: within one, the higher
    own score comes first.
    """
    if obs.by_position:
        return _peaks_by_age(obs, score, width)
    kept, others = top(obs, score, obs.live & obs.window, obs.capacity), obs.live & ~obs.window
    rest = obs.capacity - kept.sum(-1)
    order = jnp.argsort(jnp.where(obs.live, obs.position, jnp.iinfo(jnp.int32).max), axis=-1)
    own = jnp.take_along_axis(jnp.where(others, score, -jnp.inf), order, axis=-1)
    pooled = jnp.where(jnp.take_along_axis(others, order, axis=-1), max_pool(own, width), -jnp.inf)
    best_first = jnp.lexsort((-own, -pooled), axis=-1)
    place = jnp.argsort(jnp.take_along_axis(order, best_first, axis=-1), axis=-1)
    return kept | (others & (place < rest[..., None]))


# --- ranks ---


def age_rank(obs: Observation, among: Mask) -> Position:
    """The number of tokens of `among` older than each token, which need not be among them."""
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
    """Counts the candidates of `among` with a lower score. Equal scores are ordered by `tie` (None:
    `obs.precedence`). With `part`, a candidate is compared only within its own part."""
    _check(score)
    tie = obs.precedence if tie is None else tie
    if tie.shape[-1] > MOST_COMPARED:
        return _rank_by_sorting(among, score, tie, part=part)
    return compared(score, tie, among, part, implementation=obs.implementation)


def _check(score: Score | None) -> None:
    if score is None:
        raise UserError("a score is None: `needs` must name the field of `obs` that it is")


def _rank_by_sorting(among: Mask, *keys: Num[Array, "R N K"], part: Mask | None = None) -> Position:
    """The same ranks as the comparisons give, by two sorts; the first key counts most."""
    if part is not None:  # where it is false first
        before = (among & ~part).sum(-1, keepdims=True, dtype=jnp.int32)
        in_order = _rank_by_sorting(among, part.astype(jnp.int32), *keys)
        return in_order - jnp.where(part, before, 0)
    order = jnp.lexsort((*reversed(keys), ~among), axis=-1)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


# --- the order of age ---


def max_pool(score: Score, width: int) -> Score:
    """Largest score within `width` (odd) neighbours, centred; nothing lies beyond the ends."""
    size, side = score.shape[-1], width // 2
    padded = jnp.pad(score, ((0, 0), (0, 0), (side, side)), constant_values=-jnp.inf)
    return reduce(jnp.maximum, (padded[..., i : i + size] for i in range(width)))


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


def _peaks_by_age(obs: Observation, score: Score, width: int) -> Mask:
    """`window_and_peaks` token by token, where the window always fits: what goes is ranked."""
    others = obs.live & ~obs.window
    (ordered,) = by_age(obs, jnp.where(others, score, -jnp.inf))
    pooled = from_age(obs, max_pool(ordered, width))
    own = rank(obs, score, others)
    surplus = obs.live.sum(-1) - obs.capacity
    return obs.live & ~lowest(obs, pooled, others, surplus, tie=own)


def _places(obs: Observation) -> Position:
    """A place for every slot: the live tokens by age, then the others as they lie."""
    others = jnp.cumsum(~obs.live, axis=-1, dtype=jnp.int32) - 1
    total = obs.live.sum(-1, dtype=jnp.int32, keepdims=True)
    return jnp.where(obs.live, age_rank(obs, obs.live), total + others)
