"""Storing tokens in the pool, in place.

Rows are indexed explicitly (`pool.at[rows[:, None], slots]`): `[:, slots]` or vmap make TPU
relayout the whole pool. A slot number of `num_slots` or more means "do not store".
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def store(
    kv_pool: Float[Array, "R blocks block_size KV"],
    slots: Int[Array, "rows E"],
    kv: Float[Array, "R E KV"],
) -> Float[Array, "R blocks block_size KV"]:
    """Write entry e of every row into slot `slots[r, e]` (or `slots[0, e]`); slots outside the pool
    are skipped."""
    rows, _, _, width = kv_pool.shape
    flat = kv_pool.reshape(rows, -1, width)
    flat = flat.at[jnp.arange(rows)[:, None], slots].set(kv.astype(kv_pool.dtype), mode="drop")
    return flat.reshape(kv_pool.shape)


def after(slots: Int[Array, "..."], read: Float[Array, "..."]) -> Int[Array, "..."]:
    """Return `slots` unchanged, but computed only once `read` is.

    The new tokens go into slots that the attention has just read. XLA's CPU compiler copies the
    whole pool in every layer unless the data itself says that the read comes first; a comparison
    that is never true does.
    """
    never = jax.lax.stop_gradient(read.reshape(-1)[0]) > jnp.inf
    return slots + never.astype(slots.dtype)


def destinations(
    keep: Bool[Array, "R N K"],
    stored: int,
    stays: Bool[Array, "R N"],
    new_slots: Int[Array, "R N P"],
    none: int,
) -> tuple[Int[Array, "R N K"], Bool[Array, "R N K"]]:
    """Where kept tokens go so that each head's tokens are the first ones of its region, with the
    fewest moves.

    Args:
      keep: tokens to keep; the first `stored` columns are in the pool already, in table order, the
        rest are new.
      stays: whether the head keeps its region (whose table then starts with the same slots).
      new_slots: slots of the head's region after this step, in table order.
      none: slot number for tokens that need not be written.

    Returns:
      The slot of every token that must be written (else `none`), and which stored tokens remain
      where they are.
    """
    room = new_slots.shape[-1]
    count = keep.sum(-1, keepdims=True)
    column = jnp.arange(keep.shape[-1])
    in_place = keep & (column < min(stored, room)) & (column < count) & stays[..., None]
    taken = in_place[..., :stored]
    taken = jnp.pad(taken, ((0, 0), (0, 0), (0, max(0, room - stored))))[..., :room]
    vacant = (jnp.arange(room) < count) & ~taken
    homes = jnp.take_along_axis(new_slots, jnp.argsort(~vacant, axis=-1, stable=True), axis=-1)
    needy = keep & ~in_place
    turn = jnp.clip(jnp.cumsum(needy, axis=-1) - 1, 0, max(0, room - 1))
    return jnp.where(needy, jnp.take_along_axis(homes, turn, axis=-1), none), in_place
