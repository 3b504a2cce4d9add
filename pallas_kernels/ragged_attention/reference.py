"""Plain JAX ragged attention: the definition of correct, runs on every platform.

Memory: gathers the blocks of every head into a dense [R, N, P, 2 H] copy, which is what the kernels
avoid. Slots outside the valid ranges may hold anything, NaN included: they are masked before they
meet arithmetic. Sums over queries run in chunks of `CHUNK`, so that no [T, K] matrix of a large
scale exists at once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.tables import BlockTable

CHUNK = 256  # queries whose attention weights are held at once by `attention_moments`


def gather_slots(kv_pool, table: BlockTable, kv_scale):
    """Return K and V [R, N, P, H] of the listed blocks with invalid slots zeroed, and the mask [1
    or R, N, P]. With `kv_scale` the pool is int8 and the result float32."""
    rows, _, block_size, width = kv_pool.shape
    ids, mask = table.with_rows()[0], table.slot_mask(block_size)
    mask = mask if mask.ndim == 3 else mask[None]
    # explicit rows broadcast against a table shared by all rows, which is never repeated per row
    blocks = kv_pool[jnp.arange(rows)[:, None, None], ids]
    k, v = blocks[..., : width // 2], blocks[..., width // 2 :]
    if kv_scale is not None:  # a block's scales: those of all its keys, then those of its values
        scales = kv_scale[jnp.arange(rows)[:, None, None], ids][..., None]
        k = k.astype(jnp.float32) * scales[..., :block_size, :]
        v = v.astype(jnp.float32) * scales[..., block_size:, :]
    k, v = (a.reshape(rows, ids.shape[1], -1, width // 2) for a in (k, v))
    # Masked scores are not enough: a weight of 0 times a value of NaN is NaN.
    return jnp.where(mask[..., None], k, 0), jnp.where(mask[..., None], v, 0), mask


def _scores(q, k_old, mask, k_new, new_length) -> Float[Array, "R N T PT"]:
    """Masked float32 scores over stored, then own keys."""
    # Like the kernels: products in the type of the keys, sums, scores and softmax in float32.
    q = q.astype(k_new.dtype)
    old = jnp.einsum(
        "rnth,rnph->rntp", q, k_old.astype(q.dtype), preferred_element_type=jnp.float32
    )
    new = jnp.einsum("rnth,rnsh->rnts", q, k_new, preferred_element_type=jnp.float32)
    # -inf has the weight 0 exactly. No row is -inf everywhere (softmax would give NaN), because a
    # scale has at least one real token, whatever the table.
    old = jnp.where(mask[:, :, None], old, -jnp.inf)
    new = jnp.where(jnp.arange(k_new.shape[2]) < new_length, new, -jnp.inf)
    return jnp.concatenate([old, new], axis=-1)


def attention_scores(q, k_new, new_length, kv_pool, table, kv_scale):
    """See `api.attention_scores`."""
    k_old, _, mask = gather_slots(kv_pool, table, kv_scale)
    return _scores(q, k_old, mask, k_new, new_length)


def attend(projection, new_length, kv_pool, table, kv_scale, *, return_lse):
    """See `api.attend`."""
    q, k_new, v_new = projection.queries(), projection.keys(), projection.values()
    k_old, v_old, mask = gather_slots(kv_pool, table, kv_scale)
    scores = _scores(q, k_old, mask, k_new, new_length)
    # rounded to the type of V before the product, as the kernels do
    weights = jax.nn.softmax(scores, axis=-1).astype(v_new.dtype)
    stored = v_old.shape[2]
    real = jnp.arange(v_new.shape[2]) < new_length
    v_new = jnp.where(real[:, None], v_new, 0)  # padding may hold anything, and 0 * NaN is NaN
    out = jnp.einsum(
        "rnts,rnsh->rnth", weights[..., stored:], v_new, preferred_element_type=jnp.float32
    )
    if stored:
        old = weights[..., :stored]
        out += jnp.einsum(
            "rntp,rnph->rnth", old, v_old.astype(old.dtype), preferred_element_type=jnp.float32
        )
    out = out.astype(v_new.dtype).transpose(0, 2, 1, 3)
    return (out, jax.nn.logsumexp(scores, axis=-1)) if return_lse else out


def attention_moments(
    projection, new_length, kv_pool, table, query_weights, lse, kv_scale, *, squares
):
    """See `api.attention_moments`."""
    q, k_new = projection.queries(), projection.keys()
    k_old, _, mask = gather_slots(kv_pool, table, kv_scale)
    chunk = min(CHUNK, q.shape[2])

    def add(sums, inputs):
        some, weight, log_sum = inputs
        # exp(-inf) is 0: columns without a key need no mask of their own
        p = jnp.exp(_scores(some, k_old, mask, k_new, new_length) - log_sum[..., None])
        p = jnp.where(weight[:, None] != 0, p, 0)  # padded queries may be NaN; 0 * NaN is NaN
        powers = (p, p * p) if squares else (p,)
        return tuple(
            s + jnp.einsum("t,rntk->rnk", weight, a) for s, a in zip(sums, powers, strict=True)
        ), None

    zero = jnp.zeros((*q.shape[:2], k_old.shape[2] + k_new.shape[2]), jnp.float32)
    # padded with zeros, and a query of weight 0 adds nothing
    chunks = (_chunks(q, 2, chunk), _chunks(query_weights, 0, chunk), _chunks(lse, 2, chunk))
    sums, _ = jax.lax.scan(add, (zero, zero) if squares else (zero,), chunks)
    return sums[0], sums[1] if squares else None


def _chunks(array: Array, axis: int, size: int) -> Array:
    """Cut an axis into pieces of `size`, zeros behind the last one; pieces come first."""
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, -array.shape[axis] % size)
    padded = jnp.pad(array, padding)
    shape = (*array.shape[:axis], -1, size, *array.shape[axis + 1 :])
    return jnp.moveaxis(padded.reshape(shape), axis, 0)
