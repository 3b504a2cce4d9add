"""Plain JAX moves of slots: the definition of correct, runs on every platform."""

from dataclasses import replace

import jax
import jax.numpy as jnp

# Keeps XLA from fusing the read into the write: a scatter that reads its own operand is done on a
# copy of the whole pool.
_copied = jax.lax.optimization_barrier
HOW = {"mode": "drop", "unique_indices": True}  # slots of scatters that are out of the array


def move_all(layers, target, below=None):
    """See `api.move_all`; nothing but the targets is written here, so `below` does not matter.
    What moves is copied at once, because a GPU would start a kernel for each layer."""
    buffer = layers[0].pool.shape[2] - target.shape[-1]
    targets = jnp.split(target, len(layers)) if len(layers) > 1 else [target]
    new = [slots.pool[:, :, buffer:] for slots in layers]
    new = jnp.split(_copied(jnp.concatenate(new)), len(new)) if len(new) > 1 else [_copied(new[0])]
    return tuple(_moved(*of_layer) for of_layer in zip(layers, targets, new, strict=True))


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
