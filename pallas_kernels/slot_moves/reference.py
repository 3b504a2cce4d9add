"""Plain JAX moves of slots: the definition of correct, runs on every platform."""

from dataclasses import replace

import jax
import jax.numpy as jnp


def move(slots, target, last=None, below=None):
    """See `api.move`; nothing but the targets is written here, so `below` does not matter."""
    rows, heads, count = target.shape
    buffer, scale = slots.pool.shape[2] - count, slots.scale
    row, head = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None]
    if scale is not None:
        half = jnp.arange(2)[:, None, None]  # scales of keys, then of values
        scale = _scattered(
            scale, _copied(scale[..., buffer:]), (row[..., None], half, head, target[:, None])
        )
    new = _copied(slots.pool[:, :, buffer:]) if last is None else last
    pool = _scattered(slots.pool, new, (row, head, target))
    return replace(slots, pool=pool, scale=scale)


def _copied(array):
    # Keeps XLA from fusing the read into the write: a scatter that reads its own operand is done on
    # a copy of the whole pool.
    return jax.lax.optimization_barrier(array)


def _scattered(array, new, places: tuple):
    return array.at[places].set(new, mode="drop", unique_indices=True)
