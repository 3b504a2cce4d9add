"""Plain JAX token attention: the definition of correct, runs on every platform.

GPU and TPU compilers turn products with one query into sums that are fused with what their operands
come from, so that masks and halves of the pool cost nothing there. On CPUs a product takes its
operands from memory: it is given the pool as it is, queries padded with zeros where values lie, and
a masked copy is made only if an empty slot has spoilt the result. Where slots fill one after the
other, a CPU reads those in use, a block that stays in its cache at a time.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.token_attention import storing

BLOCK = 64  # slots that a CPU reads at a time, at most
TOGETHER = 2  # rows that share a turn, if they come in pairs; turns follow each other
LOWEST = -1e30  # below all scores, but finite: of a block in which nothing is visible


def attend(q, pool, position, sight, first_bias, pool_scale, mass, mass_weight):
    """See `api.attend`."""
    visible = jnp.broadcast_to(sight.sees(position), pool.shape[:3])
    arguments = (q, pool, visible, first_bias, pool_scale)
    if sight.used is None or mass is not None or pool.shape[2] <= BLOCK:
        return _of_all_slots(*arguments, mass, mass_weight)

    def of_all(_, *arguments):
        return _of_all_slots(*arguments)[0]

    choice = {"cpu": _of_slots_in_use, "default": of_all}
    return jax.lax.platform_dependent(sight.used, *arguments, **choice), None


store_and_attend = storing.before(attend)


def _of_all_slots(q, pool, visible, first_bias, pool_scale, mass=None, mass_weight=1.0):
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


def scores(q, pool, pool_scale, first: int):
    """See `api.scores`."""
    keys = _computable(pool[:, :, first:, : q.shape[-1]], q.dtype)
    found = jnp.einsum("rnqh,rnch->rnqc", q, keys, preferred_element_type=jnp.float32)
    return found if pool_scale is None else found * pool_scale[:, 0, :, None, first:]


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


def _of_slots_in_use(used, q, pool, visible, first_bias, pool_scale):
    """Rows take turns, and within a turn blocks of slots."""
    rows, _, slots, width = pool.shape
    size = -(-slots // -(-slots // BLOCK))
    together = TOGETHER if rows % TOGETHER == 0 else 1
    arrays = {"pool": pool, "visible": visible}
    if pool_scale is not None:
        arrays |= {"scale_k": pool_scale[:, 0], "scale_v": pool_scale[:, 1]}

    def turn(inputs):
        row, q, bias = inputs

        def block(number, found):
            start = jnp.minimum(number * size, slots - size)
            cut = {name: _cut(a, row, together, start, size) for name, a in arrays.items()}
            slot = start + jnp.arange(size)
            cut["visible"] &= slot >= number * size  # the last one begins in the one before
            return _with_block(found, q, **cut, bias=_bias_of(bias, slot))

        heads = q.shape[:2]
        found = jnp.full(heads, LOWEST), jnp.zeros(heads), jnp.zeros(q.shape)
        _, total, out = jax.lax.fori_loop(0, -(-used // size), block, found)
        return out[..., width // 2 :] / total[..., None]

    padded = jnp.concatenate([q, jnp.zeros_like(q)], axis=-1)
    inputs = jnp.arange(0, rows, together), *(_turns(a, together) for a in (padded, first_bias))
    return jax.lax.map(turn, inputs).reshape(q.shape).astype(q.dtype)


def _turns(array, together):
    return None if array is None else array.reshape(-1, together, *array.shape[1:])


def _cut(array, row, rows, slot, slots):
    """Some rows and slots of an array [R, N, C, ...]."""
    array = jax.lax.dynamic_slice_in_dim(array, row, rows)
    return jax.lax.dynamic_slice_in_dim(array, slot, slots, axis=2)


def _bias_of(first, slot):
    return 0.0 if first is None else jnp.where(slot == 0, first[:, None, None], 0.0)


def _with_block(found, q, pool, visible, bias, scale_k=1.0, scale_v=1.0):
    """Largest score so far, and sums of weights and of weighted values relative to it, with a block
    more (the running softmax of FlashAttention, Dao et al. 2022, arXiv 2205.14135)."""
    most, total, out = found
    pool = jnp.where(visible[..., None], pool, 0)
    numbers = _computable(pool, q.dtype)
    scores = jnp.einsum("rnh,rnch->rnc", q, numbers, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores * scale_k + bias, -jnp.inf)
    higher = jnp.maximum(most, scores.max(-1))
    weights, before = jnp.exp(scores - higher[..., None]), jnp.exp(most - higher)
    out = out * before[..., None] + _summed(jnp.where(visible, weights * scale_v, 0), pool)
    return higher, total * before + weights.sum(-1), out


def _computable(pool, dtype):
    """The numbers of an int8 pool in a type that products are computed in."""
    return pool.astype(dtype) if pool.dtype == jnp.int8 else pool
