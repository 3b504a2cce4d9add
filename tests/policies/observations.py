"""Hand-made observations with everything that selections have to cope with: dead entries anywhere,
positions in no order, new tokens among which some are the window."""

import jax.numpy as jnp
import numpy as np

from varjax.core.allocation import Geometry
from varjax.core.observation import Observation
from varjax.core.sequence import Schedule

ROWS, HEADS, STORED, NEW = 2, 3, 11, 9
DEMO = Geometry(schedule=Schedule.square((1, 2, 3, 4, 6, 8)), num_layers=3, num_heads=4, head_dim=8)
CAPACITIES = (0, 1, 2, 3, 5, 8, 13, 19, 20)


def observation(seed: int, capacity: int, window: int = 4, **more) -> Observation:
    """Random contents; scores are distinct."""
    rng = np.random.default_rng(seed)
    heads, tokens = (ROWS, HEADS), STORED + NEW
    live = np.ones((*heads, tokens), bool)
    live[..., :STORED] = rng.random((*heads, STORED)) < 0.75
    live[..., -1] = False  # padding
    position = np.zeros(live.shape, np.int32)
    for head in np.ndindex(heads):
        position[head][:STORED] = rng.permutation(2 * STORED)[:STORED]
        position[head][STORED:] = 2 * STORED + np.arange(NEW)
    position = np.where(live, position, 0)
    own = np.arange(tokens) >= STORED
    chosen = STORED + rng.permutation(NEW - 1)[:window]
    mass = rng.random(live.shape).astype(np.float32) * live
    return Observation(
        scale=jnp.int32(3),
        live=jnp.asarray(live),
        own=jnp.asarray(own),
        position=jnp.asarray(position),
        capacity=jnp.full(heads, capacity),
        regions=jnp.broadcast_to(jnp.arange(HEADS), heads),
        window=jnp.broadcast_to(np.isin(np.arange(tokens), chosen), live.shape),
        window_mass=jnp.asarray(mass),
        window_logits=jnp.asarray(np.where(live, 4 * mass - 2, -np.inf).astype(np.float32)),
        scale_mass=jnp.asarray(mass),
        total_mass=jnp.asarray(10 * mass),
        **more,
    )


def kept_columns(keep) -> dict[tuple[int, int], set[int]]:
    """Columns that each (row, head) keeps."""
    keep = np.asarray(keep)
    return {head: set(np.flatnonzero(keep[head])) for head in np.ndindex(keep.shape[:2])}


def check_counts(obs: Observation, keep) -> None:
    """A selection keeps live tokens, exactly as many as the capacity says."""
    keep, live = np.asarray(keep), np.asarray(obs.live)
    assert not (keep & ~live).any()
    np.testing.assert_array_equal(keep.sum(-1), np.minimum(obs.capacity, live.sum(-1)))


def window_and_peaks_by_hand(live, position, score, window, capacity, width) -> set[int]:
    """Columns that one head keeps: window tokens, then the best others after max-pooling."""
    cache = sorted(np.flatnonzero(live), key=lambda c: position[c])
    inside = [c for c in cache if window[c]]
    kept = sorted(inside, key=lambda c: (-score[c], c))[:capacity]
    own = [-np.inf if window[c] else score[c] for c in cache]
    side = width // 2
    pooled = [max(own[max(0, i - side) : i + side + 1]) for i in range(len(cache))]
    order = sorted(range(len(cache)), key=lambda i: (-pooled[i], -own[i], i))
    others = [cache[i] for i in order if not window[cache[i]]]
    return {*kept, *others[: capacity - len(kept)]}
