"""Arguments of token attention in the shapes of published models, for tests and the benchmark."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.cache_write.reference import encode
from pallas_kernels.token_attention.operands import HeadSlots, Query

PROTECTED = 3  # positions that `reach` hides from no head
Arguments = tuple[Query, HeadSlots]  # of `token_attention.attend`


def token_arguments(
    spec: ArgSpec,
    slots: int | None = None,
    *,
    sums: bool = True,
    shared: bool = False,
    used: int | None = None,
    poison: bool = True,
    group: int | None = None,
) -> Arguments:
    """A query, and slots in no order, of which some are empty.

    Args:
      spec: rows, heads of keys and values, and types.
      slots: of a head; None takes those of the call's tables.
      sums: ask for all that the operation offers: masses, and what comes with them.
      shared: heads have their positions in common.
      used: slots that may hold something, the first ones; None: all, and the call does not say so.
      poison: empty slots hold NaN; int8: their scales do.
      group: query heads per head of keys and values; None takes those of the call.
    """
    rng = np.random.default_rng(0)
    slots = slots or spec.entries * spec.block_size
    heads, lines = (spec.rows, spec.heads), (spec.rows, 1 if shared else spec.heads)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    position = rng.permuted(np.broadcast_to(np.arange(slots), (*lines, slots)), axis=-1)
    position = np.where(rng.random(position.shape) < 0.2, -1, position)
    position[..., used or slots :] = -1
    position[..., 0] = 0  # every head sees a slot, whatever is hidden
    k, v = (normal(*heads, slots, spec.head_dim) for _ in range(2))
    pool, scale = _pool(k, v, spec.pool_dtype)
    # as many positions are hidden for being new as for being old
    newest = slots - 1 - slots // 8
    reach = jnp.asarray(rng.integers(1, newest + 2, heads), jnp.int32)
    q = normal(spec.rows, (group or spec.queries_per_head) * spec.heads, spec.head_dim)
    query = Query(
        q=jnp.asarray(2 * spec.head_dim**-0.5 * q, spec.dtype),
        newest=jnp.int32(newest) if sums else None,
        first_bias=jnp.asarray(normal(spec.rows)) if sums else None,
        mass_weight=jnp.float32(0.5),
        protected=PROTECTED,
    )
    held = HeadSlots(
        pool=pool,
        position=jnp.asarray(position, jnp.int32),
        scale=scale,
        mass=jnp.asarray(np.abs(normal(*heads, slots))) if sums else None,
        reach=reach if sums else None,
        used=None if used is None else jnp.int32(used),
    )
    if not poison:
        return query, held
    if scale is not None:
        return query, replace(held, scale=jnp.where(position[:, None] < 0, jnp.nan, scale))
    return query, replace(held, pool=jnp.where(position[..., None] < 0, jnp.nan, pool))


def awaiting_token(query: Query, slots: HeadSlots, slot: int) -> Arguments:
    """With the position of a token that is still to be stored in its slot, which holds NaN."""
    position = slots.position.at[:, :, slot].set(0 if query.newest is None else query.newest)
    slots = replace(slots, position=position)
    if slots.scale is not None:
        return query, replace(slots, scale=slots.scale.at[..., slot].set(jnp.nan))
    return query, replace(slots, pool=slots.pool.at[:, :, slot].set(jnp.nan))


@functools.partial(jax.jit, static_argnums=2)
def _pool(k, v, dtype):
    """Both in one array, and their scales where it is int8."""
    pool, scale = encode(k, v, dtype)
    return pool, None if scale is None else jnp.moveaxis(scale, -1, 1)
