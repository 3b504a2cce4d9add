"""The algorithms of AMS-KV: what a layer's cache holds, on the host and as a device mask, and what
sizes a budget buys. The policy that uses them is in `amskv`.

Words: room (C_bgt) is what a layer may hold now: C_min, or C_max once it turned demanding. A scale
with more tokens than the room is oversize.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from varjax.cache.geometry import Geometry
from varjax.policies import building_blocks as blocks
from varjax.policies.base import Observation
from varjax.schedule import Schedule

MOST_AUTOMATIC_CONDENSED = 2  # scales, as in the paper


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes in tokens per head, and the reading of what the paper leaves open.

    whole_scales: old scales leave the cache whole; otherwise its tail is cut by tokens.
    fill: of an oversize scale, the newest tokens that still find room are kept; otherwise none.
    """

    cmin: int
    cmax: int
    condensed: int
    whole_scales: bool = False
    fill: bool = False


# --- host ---


def cache_layer(
    tokens: Sequence[int], sizes: Sizes, below: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1: (bool [K, sum of tokens], what a layer holds after each scale, the last one
    included; int64 [K], its room then). below: whether each scale's keys fail the similarity test.
    """
    starts = np.cumsum([0, *tokens])
    retained = np.zeros((len(tokens), starts[-1]), bool)
    rooms = np.zeros(len(tokens), np.int64)
    held, room = np.zeros(0, np.int64), sizes.cmin
    scale_of = np.repeat(np.arange(len(tokens)), tokens)
    for i, count in enumerate(tokens):
        if sizes.fill or count <= sizes.cmax:
            if held.size + count > room and below[i]:
                room = sizes.cmax
            held = _append(held, np.arange(starts[i], starts[i + 1]), room, sizes, scale_of)
        retained[i, held], rooms[i] = True, room
    return retained, rooms


def turned(tokens: Sequence[int], sizes: Sizes, below: np.ndarray) -> np.ndarray:
    """bool [L]: layers whose room becomes C_max, from bool [L, K]; all if the sizes are equal."""
    rooms = [cache_layer(tokens, sizes, row)[1][-1:] for row in below]
    return (np.array(rooms).max(1, initial=0) > sizes.cmin) | (sizes.cmax == sizes.cmin)


def _append(held, own, room: int, sizes: Sizes, scale_of) -> np.ndarray:
    both = np.concatenate([held, own])
    if both.size <= room:
        return both
    if own.size > room:
        room_left = room - held.size
        return np.concatenate([held, own[own.size - room_left :]]) if sizes.fill else held
    if not sizes.whole_scales:
        return np.concatenate([both[: sizes.condensed], both[sizes.condensed - room :]])
    locked, rest = both[: sizes.condensed], both[sizes.condensed :]
    while rest.size and locked.size + rest.size > room:
        rest = rest[scale_of[rest] != scale_of[rest[0]]]
    return np.concatenate([locked, rest]) if rest.size else held


def divide(
    geometry: Geometry, budget: float, demanding: int, least: int, ratio: float
) -> tuple[int, int]:
    """(C_min, C_max) of a budget: `demanding` layers hold `ratio` times as much as the others, as
    nearly as whole tokens and C_min >= `least` allow; together at most budget * F * L, and with
    budget 1 all of it."""
    full, layers = geometry.schedule.persistent_tokens, geometry.num_layers
    total = int(budget * full * layers + 1e-6)
    efficient = layers - demanding
    if not demanding or not efficient:
        return (total // layers,) * 2
    cmin = max(least, round(total / (efficient + ratio * demanding)))
    cmin = min(cmin, total // layers)
    cmax = (total - efficient * cmin) // demanding
    if cmax < full:
        return cmin, cmax
    return min(full, (total - demanding * full) // efficient), full


def divide_online(geometry: Geometry, budget: float, least: int, ratio: float) -> tuple[int, int]:
    """(C_min, C_max) when every layer must be able to hold C_max; C_min is at least `least`."""
    full = geometry.schedule.persistent_tokens
    cmax = int(budget * full + 1e-6)
    return (full if cmax == full else min(cmax, max(least, round(cmax / ratio)))), cmax


def automatic_condensed(schedule: Schedule, cmin: int) -> int:
    """Tokens of the condensed scales: two scales, or as many as take at most half of C_min."""
    most = min(MOST_AUTOMATIC_CONDENSED, schedule.num_scales - 1)
    return max((end for end in schedule.ends[:most] if end <= cmin / 2), default=0)


def without_group(schedule: Schedule, group: str, condensed: int, local: int) -> np.ndarray:
    """bool [K, tokens]: what scales see of a full cache without a group of scales. Condensed and
    local (the last `local` stored) scales are never there; intermediate ones go when they are older
    than the `local` newest."""
    scale, now = schedule.scale_of_token, np.arange(schedule.num_scales)[:, None]
    locked = np.arange(scale.size) < condensed
    kept = {
        "condensed": ~locked,
        "local": locked | (scale < schedule.num_scales - 1 - local),
        "intermediate": locked | (scale >= now - local),
    }[group]
    return kept & (scale < now)


# --- device ---


def keep(obs: Observation, room, condensed, fill, starts=None):
    """bool [R, N, K]: what survives when a head has `room` int32 [R, N], as `cache_layer` decides.

    condensed: locked tokens. fill: bool. starts: positions of first tokens of all scales if scales
    leave whole.
    """
    own = obs.live & obs.own
    oversize = (own.sum(-1) > room)[..., None]
    among = obs.live & ~(own & oversize & ~fill)
    age = obs.position.astype(jnp.float32)
    locked = blocks.top(-age, among, jnp.broadcast_to(condensed, room.shape))
    if starts is not None:
        return _keep_whole_scales(obs, among, locked, room, starts)
    stored_first = 1.0 * (~obs.own & oversize) + 2.0 * locked
    return blocks.top(age + stored_first * 2.0**21, among, room)


def _keep_whole_scales(obs: Observation, among, locked, room, starts):
    """The newest whole scales that fit beside what is locked; all that was stored if the new scale
    does not."""
    scale_of = jnp.searchsorted(starts, obs.position, side="right") - 1
    rest = among & ~locked
    member = rest[..., None] & (scale_of[..., None] == jnp.arange(starts.shape[-1]))
    count = member.sum(-2)
    newer = jnp.flip(jnp.cumsum(jnp.flip(count, -1), -1), -1)
    needed = jnp.take_along_axis(newer, scale_of, axis=-1) + locked.sum(-1, keepdims=True)
    kept = locked | (rest & (needed <= room[..., None]))
    new_fits = (kept & obs.own).any(-1, keepdims=True)
    fits = (among.sum(-1) <= room)[..., None]
    return jnp.where(fits, among, jnp.where(new_fits, kept, obs.live & ~obs.own))
