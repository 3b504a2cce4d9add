"""Storing tokens by plain JAX, for whoever has no kernel that does: the definition of correct."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.cache_write.reference import encode


def store(
    k: Float[Array, "R N T H"],
    v: Float[Array, "R N T H"],
    slot: Int[Array, ""] | int,
    pool: Num[Array, "R N C KV"],
    pool_scale: Float[Array, "R 2 N C"] | None,
) -> tuple[Num[Array, "R N C KV"], Float[Array, "R 2 N C"] | None]:
    """The pool, and an int8 pool's scales, with T tokens from slot `slot` on."""
    values, scale = encode(k, v, pool.dtype)
    pool = jax.lax.dynamic_update_slice(pool, values, (0, 0, slot, 0))
    return pool, None if pool_scale is None else store_scales(scale, slot, pool_scale)


def store_scales(
    scale: Float[Array, "R N T 2"],
    slot: Int[Array, ""] | int,
    pool_scale: Float[Array, "R 2 N C"],
) -> Float[Array, "R 2 N C"]:
    """Those of T keys and their values (see `cache_write.reference.quantize`) likewise."""
    scale = jnp.moveaxis(scale, -1, 1)
    return jax.lax.dynamic_update_slice(pool_scale, scale, (0, 0, 0, slot))


def before(attend: Callable) -> Callable:
    """`store_and_attend` of a module whose `attend` this is, in two steps."""

    def store_and_attend(q, k, v, slot, pool, position, sight, bias, scale, *mass, **options):
        pool, scale = store(k[:, :, None], v[:, :, None], slot, pool, scale)
        found = attend(q, pool, position, sight, bias, scale, *mass, **options)
        return *found, pool, scale

    return store_and_attend
