"""Plain JAX ragged attention: the definition of correct, runs on every platform.

Memory: gathers the blocks of every head into a dense [R, N, P, 2 H] copy, which is what the kernels
avoid. Slots outside the valid ranges may hold anything, NaN included: they are masked before they
meet arithmetic.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.ragged_attention.table import BlockTable


def gather_slots(kv_pool: Float[Array, "R blocks block_size KV"], table: BlockTable):
    """Return K and V [R, N, P, H] of the listed blocks with invalid slots zeroed, and the mask [1
    or R, N, P]."""
    rows, _, block_size, width = kv_pool.shape
    ids = table.ids if table.ids.ndim == 3 else table.ids[None]
    mask = table.slot_mask(block_size)
    mask = mask if mask.ndim == 3 else mask[None]
    kv = kv_pool[jnp.arange(rows)[:, None, None], ids]
    kv = kv.reshape(rows, ids.shape[1], -1, width)
    kv = jnp.where(mask[..., None], kv, 0)
    return kv[..., : width // 2], kv[..., width // 2 :], mask


def attention_scores(q, k_new, new_length, kv_pool, table):
    """Masked float32 scores over stored and own keys [R, N, T, P + T]; values of the stored slots
    [R, N, P, H]."""
    k_old, v_old, mask = gather_slots(kv_pool, table)
    q = q.astype(k_new.dtype)
    old = jnp.einsum(
        "rnth,rnph->rntp", q, k_old.astype(q.dtype), preferred_element_type=jnp.float32
    )
    new = jnp.einsum("rnth,rnsh->rnts", q, k_new, preferred_element_type=jnp.float32)
    old = jnp.where(mask[:, :, None], old, -jnp.inf)
    new = jnp.where(jnp.arange(k_new.shape[2]) < new_length, new, -jnp.inf)
    return jnp.concatenate([old, new], axis=-1), v_old


def attend(
    q: Float[Array, "R N T H"],
    k_new: Float[Array, "R N T H"],
    v_new: Float[Array, "R N T H"],
    new_length: Int[Array, ""],
    kv_pool: Float[Array, "R blocks block_size KV"],
    table: BlockTable,
) -> Float[Array, "R N T H"]:
    """See `api.attend`."""
    scores, v_old = attention_scores(q, k_new, new_length, kv_pool, table)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_new.dtype)
    stored = v_old.shape[2]
    out = jnp.einsum(
        "rnts,rnsh->rnth", weights[..., stored:], v_new, preferred_element_type=jnp.float32
    )
    if stored:
        old = weights[..., :stored]
        out += jnp.einsum(
            "rntp,rnph->rnth", old, v_old.astype(old.dtype), preferred_element_type=jnp.float32
        )
    return out.astype(v_new.dtype)


def attention_mass(q, k_new, new_length, kv_pool, table, query_weights) -> Float[Array, "R N PT"]:
    """See `api.attention_mass`."""
    scores, _ = attention_scores(q, k_new, new_length, kv_pool, table)
    return jnp.einsum("t,rntk->rnk", query_weights, jax.nn.softmax(scores, axis=-1))
