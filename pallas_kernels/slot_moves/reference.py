"""Plain JAX moves of slots: the definition of correct, runs on every platform."""

from dataclasses import replace

import jax
import jax.numpy as jnp

HOW = {"mode": "drop", "unique_indices": True}  # slots of scatters that are out of the array


def move(slots, target, below=None):
    """See `api.move`; nothing but the targets is written here, so `below` does not matter."""
    return _moved(slots, target, _copied(_last(slots, target)))


def move_all(layers, target, below=None):
    """See `api.move_all`. What moves is copied at once, because a GPU would start a kernel for each
    layer."""
    targets = jnp.split(target, len(layers))
    if len(layers) == 1:
        return (move(layers[0], target),)
    found = _copied(jnp.concatenate([_last(slots, target) for slots in layers]))
    given = zip(layers, targets, jnp.split(found, len(layers)), strict=True)
    return tuple(_moved(*of_layer) for of_layer in given)


def _last(slots, target):
    return slots.pool[:, :, slots.pool.shape[2] - target.shape[-1] :]


def _moved(slots, target, new):
    """Slots of a layer, of which `new` go to `target`."""
    rows, heads, count = target.shape
    buffer, scale = slots.pool.shape[2] - count, slots.scale
    row, head = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None]
    if scale is not None:
        half = jnp.arange(2)[:, None, None]  # scales of keys, then of values
        places = row[..., None], half, head, target[:, None]
        scale = scale.at[places].set(_copied(scale[..., buffer:]), **HOW)
    pool = slots.pool.at[row, head, target].set(new, **HOW)
    return replace(slots, pool=pool, scale=scale)


def _copied(array):
    # Keeps XLA from fusing the read into the write: a scatter that reads its own operand is done on
    # a copy of the whole pool.
    return jax.lax.optimization_barrier(array)
