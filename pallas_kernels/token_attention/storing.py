"""Storing tokens with plain JAX, for implementations without a kernel for it: the definition of
correct."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cache_write.reference import encode
from pallas_kernels.token_attention.operands import HeadSlots, NewToken, Probe, Query

Slots = TypeVar("Slots", bound=HeadSlots)


def store(
    slots: Slots,
    k: Float[Array, "R M T H"],
    v: Float[Array, "R M T H"],
    slot: Int[Array, ""] | int,
) -> Slots:
    """The slots with T tokens from slot `slot` on, the same one in all rows and heads. Positions
    are left to the caller."""
    values, scale = encode(k, v, slots.pool.dtype)
    # in place if nobody needs the old pool: XLA writes these slots only
    pool = jax.lax.dynamic_update_slice(slots.pool, values, (0, 0, slot, 0))
    if slots.scale is None:
        return replace(slots, pool=pool)
    return replace(slots, pool=pool, scale=store_scales(scale, slot, slots.scale))


def store_scales(
    scale: Float[Array, "R M T 2"],
    slot: Int[Array, ""] | int,
    stored: Float[Array, "R 2 M C"],
) -> Float[Array, "R 2 M C"]:
    """`stored` with the scales of T keys and their values (see `cache_write.reference.quantize`)
    from slot `slot` on."""
    scale = jnp.moveaxis(scale, -1, 1)  # scales of keys lie apart from those of values
    return jax.lax.dynamic_update_slice(stored, scale, (0, 0, 0, slot))


def in_two_steps(attend: Callable, scores: Callable | None = None) -> Callable:
    """`store_and_attend` for a module that can only `attend`: XLA stores, then it attends. scores:
    as `api.scores`, for a probe, which takes a pass of its own here; None: no probe comes."""

    def store_and_attend(query: Query, slots: Slots, token: NewToken, **options):
        # first, so that the token sees itself
        slots = store(slots, token.k[:, :, None], token.v[:, :, None], token.slot)
        if query.probe is not None:
            slots = replace(slots, scores=_probed(query.probe, slots, scores))
        out, mass = attend(replace(query, probe=None), slots, **options)
        return out, replace(slots, mass=mass)

    return store_and_attend


def _probed(probe: Probe, slots: HeadSlots, scores: Callable) -> Float[Array, "R M C"]:
    """The scores of a probe; those that are there where it is not asked."""

    def asked(held: HeadSlots):
        return scores(probe.mean[:, :, None], held, 0)[:, :, 0]

    return jax.lax.cond(probe.wanted, asked, lambda held: held.scores, slots)
