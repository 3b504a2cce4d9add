"""Plain JAX moves of slots: the definition of correct, runs on every platform."""

from dataclasses import replace

import jax
import jax.numpy as jnp


def move(slots, target):
    """See `api.move`."""
    rows, heads, last = target.shape
    buffer, scale = slots.pool.shape[2] - last, slots.scale
    row, head = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None]
    if scale is not None:
        half = jnp.arange(2)[:, None, None]  # scales of keys, then of values
        scale = _scattered(
            scale, scale[..., buffer:], (row[..., None], half, head, target[:, None])
        )
    pool = _scattered(slots.pool, slots.pool[:, :, buffer:], (row, head, target))
    return replace(slots, pool=pool, scale=scale)


def _scattered(array, new, places: tuple):
    # The barrier keeps XLA from fusing the read into the write: a scatter that reads its own
    # operand is done on a copy of the whole pool.
    new = jax.lax.optimization_barrier(new)
    return array.at[places].set(new, mode="drop", unique_indices=True)
