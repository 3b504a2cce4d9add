"""Plain JAX moves of slots: the definition of correct, runs on every platform."""

import jax
import jax.numpy as jnp


def move(pool, slot, pool_scale):
    """See `api.move`."""
    rows, heads, last = slot.shape
    buffer = pool.shape[2] - last
    row, head = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None]
    if pool_scale is not None:
        places = row[..., None], jnp.arange(2)[:, None, None], head, slot[:, None]
        pool_scale = _scattered(pool_scale, pool_scale[..., buffer:], *places)
    return _scattered(pool, pool[:, :, buffer:], row, head, slot), pool_scale


def _scattered(array, new, *places):
    # The barrier keeps XLA from fusing the read into the write: a scatter that reads its own
    # operand is done on a copy of the whole pool.
    new = jax.lax.optimization_barrier(new)
    return array.at[places].set(new, mode="drop", unique_indices=True)
