"""Plain JAX attention over a text: the definition of correct, runs on every platform."""

import jax
import jax.numpy as jnp

SCORE_BYTES = 2**28  # scores that may exist at once, of all rows that are computed together


def attend_text(q, text, layer):
    """See `api.attend_text`. Rows take turns where the scores of all rows are large."""
    rows, tokens, heads, size = q.shape
    stored = text.kv_pool.reshape(rows, text.layers, heads, -1, 2 * size)
    both = jax.lax.dynamic_index_in_dim(stored, jnp.asarray(layer), 1, keepdims=False)
    visible = jnp.arange(both.shape[2]) < text.length[:, None]
    arguments = (q.transpose(0, 2, 1, 3), both[..., :size], both[..., size:], visible)
    # scores and weights, float32 both
    at_once = SCORE_BYTES // (2 * 4 * heads * tokens * both.shape[2])
    if at_once >= rows:
        return attend_visible(*arguments).transpose(0, 2, 1, 3)

    def one(row):
        return attend_visible(*(a[None] for a in row))[0]

    found = jax.lax.map(one, arguments, batch_size=max(1, at_once))
    return found.transpose(0, 2, 1, 3)


def attend_visible(q, k, v, visible):
    """Attention of queries [R, N, T, H] over keys and values [R, N, M, H], of which a row sees
    those where `visible` [R, M]."""
    scores = jnp.einsum("rnth,rnmh->rntm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("rntm,rnmh->rnth", weights, v)
