"""Effects on a loss of turning gates over: opening those that are shut, shutting the others.

A gate multiplies exp(score) of a key, and its gradient tells of small changes only: that of a key
which takes nearly all of the attention is almost nothing, though all is lost without it. But the
output o of a query is known for the gate turned over, too. With w the weight of the key, and v its
value, o moves by w / (1 - w) (o - v) when it goes; by w (v - o) when it comes, w being its weight
then. The gradient with respect to o times this way is the effect of each turn to first order,
for all gates at once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Of a shut gate: nothing of its key is left in a sum, and its logarithm, -30, is a number. Gates of
# lower logarithms than the second are shut.
SHUT, BELOW = 1e-13, -1.0
LEAST_REST = 1e-3  # weight of all other keys, where one takes nearly all


def attention(
    q: Float[Array, "R GN T H_and_C"],
    k: Float[Array, "R N K H_and_C"],
    v: Float[Array, "R N K H"],
    mask: Bool[Array, "*#of_heads T K"] | None = None,
) -> Float[Array, "R T GN H"]:
    """Attention of `Gates` that are 1 or `SHUT`. Its derivative with respect to the logarithm of a
    gate is the effect of the open gate less that of the shut one; all others are the usual ones."""
    group, size = q.shape[1] // k.shape[1], v.shape[-1]
    k, v = (jnp.repeat(a, group, axis=1) for a in (k, v))
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    return _attended(q[..., :size], k[..., :size], v, q[..., size:], k[..., size:], mask)


@jax.custom_vjp
def _attended(q, k, v, own, logs, mask):
    return _with_scores(q, k, v, own, logs, mask)[0]


def _with_scores(q, k, v, own, logs, mask):
    """Outputs [R, T, N, H]; and [R, N, T, K]: scores without gates, and logarithms of gates."""
    scores, gates = (
        jnp.einsum("rntc,rnkc->rntk", *each, preferred_element_type=jnp.float32)
        for each in ((q, k), (own, logs))
    )
    weights = jax.nn.softmax(jnp.where(mask, scores + gates, -jnp.inf), axis=-1)
    attended = jnp.einsum("rntk,rnkh->rnth", weights.astype(v.dtype), v).transpose(0, 2, 1, 3)
    return attended, scores, gates


def _forward(*arrays):
    return _attended(*arrays), arrays


def _backward(arrays, given: Float[Array, "R T N H"]):
    q, k, v, own, logs, mask = arrays
    _, scores, gates = _with_scores(*arrays)
    gated = jnp.where(mask, scores + gates, -jnp.inf)
    weights = jax.nn.softmax(gated, axis=-1)
    along = jnp.einsum("rtnh,rnkh->rntk", given, v, preferred_element_type=jnp.float32)
    apart = along - (weights * along).sum(-1, keepdims=True)  # gradient times (v - o)
    gone = weights / jnp.maximum(1 - weights, LEAST_REST)
    come = jax.nn.sigmoid(scores - jax.nn.logsumexp(gated, axis=-1, keepdims=True))
    turned = jnp.where(mask, jnp.where(gates > BELOW, gone, come) * apart, 0).astype(own.dtype)
    usual = (weights * apart).astype(q.dtype)
    return (
        jnp.einsum("rntk,rnkh->rnth", usual, k),
        jnp.einsum("rntk,rnth->rnkh", usual, q),
        jnp.einsum("rntk,rtnh->rnkh", weights.astype(v.dtype), given),
        None,
        jnp.einsum("rntk,rntc->rnkc", turned, own),
        None,
    )


_attended.defvjp(_forward, _backward)
