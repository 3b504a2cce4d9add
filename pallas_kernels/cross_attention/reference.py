"""Plain JAX attention over a text: the definition of correct, runs on every platform."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.cache_write.reference import order_after
from pallas_kernels.ragged_attention.reference import in_turns

SCORE_BYTES = 2**28  # scores that may exist at once, of all rows that are computed together


def attend_text(q, text, layer):
    """See `api.attend_text`. Rows take turns where the scores of all rows are large."""
    rows, tokens, heads, size = q.shape
    stored = text.kv_pool.reshape(rows, text.layers, heads, -1, 2 * size)
    # Layers are not cut out of the text before their turn: XLA would cut out all of them at once,
    # ahead of the first one, and so have the whole text twice.
    layer = order_after(jnp.asarray(layer), q)
    # scores and weights, float32 both
    at_once = max(1, SCORE_BYTES // (2 * 4 * heads * tokens * stored.shape[3]))
    operands = q, stored, text.length
    if at_once >= rows:
        return _attend_rows(layer, *operands)
    return in_turns(partial(_attend_rows, layer), operands, q, at_once)


def _attend_rows(layer, q, stored, length):
    """Queries [R, T, N, H] attend to the text of their rows, in a layer of `stored`
    [R, L, N, M, 2 H]."""
    both = jax.lax.dynamic_index_in_dim(stored, layer, 1, keepdims=False)
    k, v = jnp.split(both, 2, axis=-1)
    visible = jnp.arange(both.shape[2]) < length[:, None]
    return attend_visible(q.transpose(0, 2, 1, 3), k, v, visible).transpose(0, 2, 1, 3)


def attend_visible(q, k, v, visible):
    """Attention of queries [R, N, T, H] over keys and values [R, N, M, H], of which a row sees
    those where `visible` [R, M]."""
    scores = jnp.einsum("rnth,rnmh->rntm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("rntm,rnmh->rnth", weights, v)
