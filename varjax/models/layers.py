"""Small parts shared by transformer decoders: normalisation, dense projection, head split, dense
masked attention."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float


def layer_norm(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """Layer normalisation without learned scale or shift; statistics in float32, result in the type
    of `x`."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


def l2_normalize(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Scale the last axis to unit length in float32; lengths below 1e-12 are treated as 1e-12, as
    torch does."""
    wide = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.square(wide).sum(-1, keepdims=True))
    return (wide / jnp.maximum(norm, 1e-12)).astype(x.dtype)


def modulate(x, scale, shift):
    """AdaLN: x * (1 + scale) + shift with per-row vectors [R, D] over x [R, T, D]."""
    return x * (1 + scale[:, None]) + shift[:, None]


def split_heads(x: Float[Array, "R T D"], head_dim: int) -> Float[Array, "R N T H"]:
    rows, length, _ = x.shape
    return x.reshape(rows, length, -1, head_dim).transpose(0, 2, 1, 3)


def merge_heads(x: Float[Array, "R N T H"]) -> Float[Array, "R T D"]:
    rows, heads, length, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows, length, heads * size)


def dense_attention(
    q: Float[Array, "R N T H"],
    k: Float[Array, "R N K H"],
    v: Float[Array, "R N K H"],
    mask: Bool[Array, "T K"],
) -> Float[Array, "R N T H"]:
    """Softmax attention with an explicit mask, scale already in `q`. Used by teacher forcing, not
    by generation."""
    scores = jnp.einsum("rnth,rnkh->rntk", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("rntk,rnkh->rnth", weights.astype(v.dtype), v)


def stack_layers(make, num_layers: int, rngs: nnx.Rngs):
    """Build `num_layers` modules with one vmapped initialisation: every parameter gains a leading
    layer axis."""
    return nnx.vmap(make, in_axes=0, out_axes=0)(
        rngs.split(num_layers) if hasattr(rngs, "split") else rngs.fork(split=num_layers)
    )
