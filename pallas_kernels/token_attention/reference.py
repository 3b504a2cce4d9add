"""Plain JAX token attention: the definition of correct, runs on every platform.

GPU and TPU compilers turn products with one query into sums and fuse them with whatever makes their
operands, so masks and halves of the pool cost nothing there. On CPUs a product reads its operands
from memory. So it gets the pool as it is and queries with zeros where values lie, and a masked copy
is made only if an empty slot has spoilt the result. Where slots fill one after the other, a CPU
reads those in use, one block at a time, which stays in its cache.

Arrays of queries are [R, M, ...], or [R, M, G, ...] where G > 1 query heads share a head of keys
and values: the products below have an ellipsis in this place, and `_per_query` puts an axis there.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cache_write.reference import encode
from pallas_kernels.token_attention import operands
from pallas_kernels.token_attention.operands import HeadSlots, NewToken, Query

Slots = TypeVar("Slots", bound=HeadSlots)

BLOCK = 64  # slots that a CPU reads at a time, at most
TOGETHER = 2  # rows that share a turn, if their number is even; turns follow each other
LOWEST = -1e30  # the maximum of a block in which nothing is visible: below all scores, but finite


def attend(query, slots):
    """See `api.attend`."""
    reach = None if slots.reach is None else slots.reach[..., None]
    seen = operands.visible(slots.position, query.newest, reach, query.protected)
    seen = jnp.broadcast_to(seen, slots.pool.shape[:3])
    q, group = query.q, slots.group_size(query.q)
    if group > 1:
        q = q.reshape(q.shape[0], -1, group, q.shape[-1])
    arrays = q, slots.pool, seen, query.first_bias, slots.scale
    # sums take the weights of all slots, which the running softmax does not have
    if slots.used is None or slots.mass is not None or slots.pool.shape[2] <= BLOCK:
        (out, weights), mass = _all_slots(*arrays), slots.mass
        out = out.reshape(query.q.shape)
        if mass is not None:
            # a group's queries read the same slots, so they count in the same sums
            mass = mass + query.mass_weight * (weights if group == 1 else weights.sum(2))
        return out, mass
    choice = {"cpu": _slots_in_use, "default": lambda used, *arrays: _all_slots(*arrays)[0]}
    out = jax.lax.platform_dependent(slots.used, *arrays, **choice)
    return out.reshape(query.q.shape), None


def scores(q, slots, first: int):
    """See `api.scores`; q: [R, M, Q, H], the queries of a group among the Q."""
    # float32 queries of a policy meet keys of any type: the product has the wider one
    keys = _computable(slots.pool[:, :, first:, : q.shape[-1]], q.dtype)
    found = jnp.einsum("rnqh,rnch->rnqc", q, keys, preferred_element_type=jnp.float32)
    return found if slots.scale is None else found * slots.scale[:, 0, :, None, first:]


# --- storing ---


def store(
    slots: Slots, k: Float[Array, "R M T H"], v: Float[Array, "R M T H"], slot: Int[Array, ""] | int
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
    scale: Float[Array, "R M T 2"], slot: Int[Array, ""] | int, stored: Float[Array, "R 2 M C"]
) -> Float[Array, "R 2 M C"]:
    """`stored` with the scales of T keys and their values (see `cache_write.reference.quantize`)
    from slot `slot` on."""
    scale = jnp.moveaxis(scale, -1, 1)  # scales of keys lie apart from those of values
    return jax.lax.dynamic_update_slice(stored, scale, (0, 0, 0, slot))


def in_two_steps(attend: Callable, scores: Callable | None = None) -> Callable:
    """`store_and_attend` for a module that can only `attend`: XLA stores, then it attends. scores:
    as `api.scores`, for a probe, which takes a pass of its own here; None: no probe comes."""

    def store_and_attend(query: Query, slots: Slots, token: NewToken):
        # first, so that the token sees itself
        slots = store(slots, token.k[:, :, None], token.v[:, :, None], token.slot)
        if (probe := query.probe) is not None:
            found = jax.lax.cond(
                probe.wanted,
                lambda held: scores((probe.total / probe.count)[:, :, None], held, 0)[:, :, 0],
                lambda held: held.scores,
                slots,
            )
            slots = replace(slots, scores=found)
        out, mass = attend(replace(query, probe=None), slots)
        return out, replace(slots, mass=mass)

    return store_and_attend


store_and_attend = in_two_steps(attend, scores)


def scores_on_the_way(slots) -> bool:
    """Whether `store_and_attend` scores a probe itself."""
    return False


def _per_query(array, q):
    """Numbers of slots [R, M, C], with an axis for the queries of a group if `q` has one."""
    return array if q.ndim == 3 else array[:, :, None]


# --- all slots at once ---


def _all_slots(q, pool, visible, first_bias, scale):
    """The output and the attention weights of every query."""
    # chosen when the program is lowered, so one trace serves all platforms
    scores = jax.lax.platform_dependent(
        q,
        pool,
        # of the whole: no half of the pool is copied
        cpu=lambda q, pool: _products(jnp.concatenate([q, jnp.zeros_like(q)], axis=-1), pool),
        default=lambda q, pool: _products(q, pool[..., : q.shape[-1]]),
    )
    seen = _per_query(visible, q)
    if scale is not None:
        scores = scores * _per_query(scale[:, 0], q)
    if first_bias is not None:
        scores = scores.at[..., 0].add(first_bias.reshape(-1, *[1] * (q.ndim - 2)))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    factors = weights
    if scale is not None:
        # the scale of an empty slot may be NaN, and 0 times NaN is NaN
        factors = jnp.where(seen, weights * _per_query(scale[:, 1], q), 0)
    out = jax.lax.platform_dependent(factors, pool, visible, cpu=_sums_of_the_whole, default=_sums)
    return out.astype(q.dtype), weights


def _products(q, keys):
    """Scores [R, M, C], float32."""
    keys = _computable(keys, q.dtype)
    return jnp.einsum("rn...h,rnch->rn...c", q, keys, preferred_element_type=jnp.float32)


def _sums(weights, pool, visible):
    """Weighted sums of values [R, M, H], float32. Slots that are not visible have weight 0, and are
    masked as well, because 0 times NaN is NaN."""
    values = jnp.where(visible[..., None], pool[..., pool.shape[-1] // 2 :], 0)
    return _summed(weights, values)


def _sums_of_the_whole(weights, pool, visible):
    """The same from whole slots: masked, which takes a copy, only if the result is spoilt."""
    found = _summed(weights, pool)
    found = jax.lax.cond(
        jnp.isfinite(found).all(),
        lambda same: same,
        lambda _: _summed(weights, jnp.where(visible[..., None], pool, 0)),
        found,
    )
    return found[..., pool.shape[-1] // 2 :]


def _summed(weights, pool):
    # rounded to the type of the values before the product, as kernels do
    pool = _computable(pool, jnp.float32)
    weights = weights.astype(pool.dtype)
    return jnp.einsum("rn...c,rnch->rn...h", weights, pool, preferred_element_type=jnp.float32)


# --- slots in use, on CPUs ---


def _slots_in_use(used, q, pool, visible, first_bias, scale):
    """The output; rows take turns, and within a turn blocks of slots."""
    rows, _, slots, width = pool.shape
    size = -(-slots // -(-slots // BLOCK))  # blocks of equal size, as few as BLOCK allows
    together = TOGETHER if rows % TOGETHER == 0 else 1
    arrays = {"pool": pool, "visible": visible}
    if scale is not None:
        arrays |= {"scale_k": scale[:, 0], "scale_v": scale[:, 1]}

    def turn(inputs):
        row, q, bias = inputs

        def block(number, found):
            # slices keep their size: the last block begins before its first own slot
            start = jnp.minimum(number * size, slots - size)
            slices = jax.lax.dynamic_slice_in_dim
            cut = {
                name: slices(slices(a, row, together), start, size, axis=2)
                for name, a in arrays.items()
            }
            slot = start + jnp.arange(size)
            cut["visible"] &= slot >= number * size  # others were in the block before
            first = 0.0
            if bias is not None:
                first = jnp.where(slot == 0, bias.reshape(-1, *[1] * (q.ndim - 1)), 0.0)
            return _with_block(found, q, **cut, bias=first)

        heads = q.shape[:-1]
        found = jnp.full(heads, LOWEST), jnp.zeros(heads), jnp.zeros(q.shape)
        _, total, out = jax.lax.fori_loop(0, -(-used // size), block, found)
        return out[..., width // 2 :] / total[..., None]

    padded = jnp.concatenate([q, jnp.zeros_like(q)], axis=-1)
    operands = jax.tree.map(lambda a: a.reshape(-1, together, *a.shape[1:]), (padded, first_bias))
    turns = jnp.arange(0, rows, together), *operands
    return jax.lax.map(turn, turns).reshape(q.shape).astype(q.dtype)


def _with_block(found, q, pool, visible, bias, scale_k=None, scale_v=None):
    """Largest score so far, and sums of weights and of weighted values relative to it, with a block
    more (the running softmax of FlashAttention, Dao et al. 2022, arXiv 2205.14135)."""
    most, total, out = found
    # masked before the products: a block is small, and NaN would stay in the running sums
    pool = jnp.where(visible[..., None], pool, 0)
    seen = _per_query(visible, q)
    scores = _products(q, pool)
    if scale_k is not None:
        scores = scores * _per_query(scale_k, q)
    scores = jnp.where(seen, scores + bias, -jnp.inf)
    higher = jnp.maximum(most, scores.max(-1))  # LOWEST at least, so exp never sees inf - inf
    weights, rescale = jnp.exp(scores - higher[..., None]), jnp.exp(most - higher)
    factors = weights if scale_v is None else weights * _per_query(scale_v, q)
    out = out * rescale[..., None] + _summed(jnp.where(seen, factors, 0), pool)
    return higher, total * rescale + weights.sum(-1), out


def _computable(pool, dtype):
    """The numbers of an int8 pool in a type that products are computed in."""
    return pool.astype(dtype) if pool.dtype == jnp.int8 else pool
