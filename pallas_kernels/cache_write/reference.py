"""Plain JAX storing of tokens, in place: the definition of correct, runs on every platform.

Rows are indexed explicitly (`pool.at[rows[:, None], slots]`). With `[:, slots]` or vmap, XLA's TPU
compiler lays the whole pool out anew.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LARGEST_INT8 = 127.0  # a symmetric range: -128 is not used


def quantize(x: Float[Array, "... H"]) -> tuple[Int[Array, "... H"], Float[Array, "..."]]:
    """Keys or values as int8, and their scales (float32): largest magnitude / 127."""
    # A product with the reciprocal, spelled out: compilers replace some divisions by it and not
    # others, and the kernels have to store the same numbers, bit for bit.
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1) / LARGEST_INT8
    whole = jnp.round(x * inverse_scale(scale)[..., None])
    return whole.astype(jnp.int8), scale


def inverse_scale(scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """The factor that turns numbers into whole ones, 1 / scale; 1 where all numbers are zero or the
    scale has no float32 reciprocal."""
    return 1 / jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, 1)


def encode(k: Float[Array, "... H"], v: Float[Array, "... H"], dtype):
    """Tokens as the pool holds them, [..., 2 H], and for an int8 pool their scales [..., 2]."""
    if dtype != jnp.int8:
        return jnp.concatenate([k, v], axis=-1).astype(dtype), None
    (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
    return jnp.concatenate([k, v], axis=-1), jnp.stack([k_scale, v_scale], axis=-1)


def scale_slots(slots: Int[Array, "..."], block_size: int) -> Int[Array, "... 2"]:
    """The places of a slot's two scales, of key and value, in the flat `kv_scale`."""
    key = slots // block_size * (2 * block_size) + slots % block_size
    return jnp.stack([key, key + block_size], axis=-1)


def scatter(
    kv_pool: Array,
    kv_scale: Array | None,
    slots: Int[Array, "rows E"],
    values: Array,
    scales: Float[Array, "R E 2"] | None,
) -> tuple[Array, Array | None]:
    """Put entry e of every row r into slot `slots[r, e]`, or `slots[0, e]` where rows share slots.
    Slots outside the pool are skipped. values: [R, E, 2 H], as the pool holds them."""
    rows, _, block_size, width = kv_pool.shape
    row = jnp.arange(rows)[:, None]
    # "drop" makes a slot outside the pool mean "not stored"
    flat = kv_pool.reshape(rows, -1, width).at[row, slots].set(values, mode="drop")
    pool = flat.reshape(kv_pool.shape)
    if kv_scale is None:
        return pool, None
    where = scale_slots(slots, block_size).reshape(len(slots), -1)
    flat = kv_scale.reshape(rows, -1).at[row, where].set(scales.reshape(rows, -1), mode="drop")
    return pool, flat.reshape(kv_scale.shape)


def order_after(numbers: Int[Array, "..."], read: Float[Array, "..."]) -> Int[Array, "..."]:
    """Return `numbers` unchanged, but only once `read` is computed."""
    # New tokens go into slots that the attention has just read. XLA's compilers for CPU and GPU
    # copy the whole pool in every layer unless the data itself says that the read comes first. A
    # comparison that is never true says so. The compiler for TPUs orders the two by itself.

    def ordered(numbers, read):
        never = jax.lax.stop_gradient(read.reshape(-1)[0]) > jnp.inf
        return numbers + never.astype(numbers.dtype)

    return jax.lax.platform_dependent(numbers, read, tpu=lambda n, _: n, default=ordered)


def write(kv_pool, projection, writes, kv_scale, *, after=None):
    """See `api.write`."""
    k, v, writes = projection.keys(), projection.values(), writes.sliced()
    rows, heads = k.shape[:2]
    none = kv_pool.shape[1] * kv_pool.shape[2]  # the first slot behind the pool: `scatter` drops it
    source = writes.source.reshape(*writes.ids.shape[:-1], -1)
    if after is not None:
        source = order_after(source, after)
    slots = jnp.where(source >= 0, writes.slots, none)
    slots, source = (a if a.ndim == 3 else a[None] for a in (slots, source))
    # before the gather: every token is quantised once
    values, scales = encode(k, v, kv_pool.dtype)
    # slots without a token (-1) gather token 0, which is dropped with them
    index = (jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None], jnp.maximum(source, 0))
    values = values[index].reshape(rows, -1, values.shape[-1])
    if scales is not None:
        scales = scales[index].reshape(rows, -1, 2)
    return scatter(kv_pool, kv_scale, slots.reshape(len(slots), -1), values, scales)
