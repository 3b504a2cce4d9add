"""Storing tokens in the pool, in place.

Rows are indexed explicitly (`pool.at[rows[:, None], slots]`): `[:, slots]` or vmap make TPU
relayout the whole pool. A slot number of `num_slots` or more means "do not store".
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from varjax.cache.state import KVState

LARGEST_INT8 = 127.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Entries:
    """Tokens as the pool holds them: values [R, N, E, 2 H] and, in an int8 pool, the scales of keys
    and values, float32 [R, N, E, 2]."""

    values: Array
    scales: Float[Array, "R N E 2"] | None = None

    @classmethod
    def encode(cls, kv: Float[Array, "R N E KV"], dtype) -> "Entries":
        """Tokens in the type of the pool. int8: each token's key and value are divided by their
        largest magnitude / 127 and rounded."""
        if dtype != jnp.int8:
            return cls(kv.astype(dtype))
        halves = kv.astype(jnp.float32).reshape(*kv.shape[:-1], 2, -1)
        scales = jnp.abs(halves).max(-1) / LARGEST_INT8
        whole = jnp.round(halves / jnp.where(scales > 0, scales, 1)[..., None])
        return cls(whole.astype(jnp.int8).reshape(kv.shape), scales)

    @classmethod
    def read(cls, state: KVState, slots: Int[Array, "R N P"]) -> "Entries":
        """What is stored in some slots, as it is stored."""
        rows = jnp.arange(slots.shape[0])[:, None, None]
        width = state.kv_pool.shape[-1]
        values = state.kv_pool.reshape(len(rows), -1, width)[rows, slots]
        if state.kv_scale is None:
            return cls(values)
        flat = state.kv_scale.reshape(len(rows), -1)
        return cls(values, flat[rows[..., None], scale_slots(slots, state.block_size)])

    def before(self, later: "Entries") -> "Entries":
        """These entries followed by others."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), self, later)


def scale_slots(slots: Int[Array, "..."], block_size: int) -> Int[Array, "... 2"]:
    """Where the scales of key and value of a slot lie in the flat `kv_scale`."""
    key = slots // block_size * (2 * block_size) + slots % block_size
    return jnp.stack([key, key + block_size], axis=-1)


def store(state: KVState, slots: Int[Array, "rows E"], entries: Entries) -> KVState:
    """Write entry e (over heads and tokens) of every row into slot `slots[r, e]` (or
    `slots[0, e]`); slots outside the pool are skipped."""
    rows, _, block_size, width = state.kv_pool.shape
    row = jnp.arange(rows)[:, None]
    flat = state.kv_pool.reshape(rows, -1, width)
    flat = flat.at[row, slots].set(entries.values.reshape(rows, -1, width), mode="drop")
    state = replace(state, kv_pool=flat.reshape(state.kv_pool.shape))
    if state.kv_scale is None:
        return state
    flat = state.kv_scale.reshape(rows, -1)
    where = scale_slots(slots, block_size).reshape(len(slots), -1)
    flat = flat.at[row, where].set(entries.scales.reshape(rows, -1), mode="drop")
    return replace(state, kv_scale=flat.reshape(state.kv_scale.shape))


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
