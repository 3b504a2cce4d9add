"""Plain JAX token attention: the definition of correct, runs on every platform.

GPU and TPU compilers turn products with one query into sums that are fused with what their operands
come from, so that masks and halves of the pool cost nothing there. On CPUs a product takes its
operands from memory: it is given the pool as it is, queries padded with zeros where values lie, and
a masked copy is made only if an empty slot has spoilt the result.
"""

import jax
import jax.numpy as jnp


def attend(q, pool, position, sight, first_bias, pool_scale, mass, mass_weight):
    """See `api.attend`."""
    visible = jnp.broadcast_to(sight.sees(position), pool.shape[:3])
    scores = jax.lax.platform_dependent(q, pool, cpu=_products_of_the_whole, default=_products)
    if pool_scale is not None:
        scores = scores * pool_scale[:, 0]
    if first_bias is not None:
        scores = scores.at[:, :, 0].add(first_bias[:, None])
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    seen = weights
    if pool_scale is not None:
        seen = jnp.where(visible, weights * pool_scale[:, 1], 0)
    out = jax.lax.platform_dependent(seen, pool, visible, cpu=_sums_of_the_whole, default=_sums)
    if mass is not None:
        mass = mass + mass_weight * weights
    return out.astype(q.dtype), mass


def scores(q, pool, pool_scale):
    """See `api.scores`."""
    keys = _computable(pool[..., : q.shape[-1]], q.dtype)
    found = jnp.einsum("rnqh,rnch->rnqc", q, keys, preferred_element_type=jnp.float32)
    return found if pool_scale is None else found * pool_scale[:, 0, :, None]


def _products(q, pool):
    """Scores [R, N, C], float32."""
    keys = _computable(pool[..., : q.shape[-1]], q.dtype)
    return jnp.einsum("rnh,rnch->rnc", q, keys, preferred_element_type=jnp.float32)


def _products_of_the_whole(q, pool):
    padded = jnp.concatenate([q, jnp.zeros_like(q)], axis=-1)
    pool = _computable(pool, q.dtype)
    return jnp.einsum("rnh,rnch->rnc", padded, pool, preferred_element_type=jnp.float32)


def _sums(weights, pool, visible):
    """Weighted sums of values [R, N, H], float32. A weight of 0 times NaN is NaN: slots that are
    not visible are masked, too."""
    values = jnp.where(visible[..., None], pool[..., pool.shape[-1] // 2 :], 0)
    return _summed(weights, values)


def _sums_of_the_whole(weights, pool, visible):
    def again(_):
        return _summed(weights, jnp.where(visible[..., None], pool, 0))

    found = _summed(weights, pool)
    found = jax.lax.cond(jnp.isfinite(found).all(), lambda same: same, again, found)
    return found[..., pool.shape[-1] // 2 :]


def _summed(weights, pool):
    # rounded to the type of the values before the product, as kernels do
    pool = _computable(pool, jnp.float32)
    weights = weights.astype(pool.dtype)
    return jnp.einsum("rnc,rnch->rnh", weights, pool, preferred_element_type=jnp.float32)


def _computable(pool, dtype):
    """The numbers of an int8 pool in a type that products are computed in."""
    return pool.astype(dtype) if pool.dtype == jnp.int8 else pool
