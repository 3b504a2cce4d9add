"""Plain JAX products of one token: the definition of correct, runs on every platform."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.token_attention.operands import QuerySum
from pallas_kernels.token_products.operands import Angles, TokenStream


def start(x, norm, eps: float, dtype) -> TokenStream:
    """See `api.start`."""
    return TokenStream(x, norm, eps=eps)


def project(stream: TokenStream, weights, angles: Angles, total: QuerySum | None):
    """See `api.project`."""
    product = jnp.dot(_normal(stream, weights.dtype), weights)
    q, k, v = jnp.split(product, [angles.queries, angles.queries + angles.keys], axis=1)
    q, k = (_turned(q, angles) * angles.scale).astype(q.dtype), _turned(k, angles).astype(k.dtype)
    if total is None:
        return (q, k, v), None
    before = jnp.where(total.keep > 0, total.total, 0.0)
    return (q, k, v), before + total.weight * q.astype(jnp.float32)


def gate(stream: TokenStream, weights):
    """See `api.gate`."""
    gates, values = jnp.split(jnp.dot(_normal(stream, weights.dtype), weights), 2, axis=1)
    return jax.nn.silu(gates) * values


def add(stream: TokenStream, branch, weights, norm) -> TokenStream:
    """See `api.add`."""
    product = jnp.dot(branch.astype(weights.dtype), weights)
    return replace(stream, x=stream.x + product.astype(jnp.float32), norm=norm)


def _normal(stream: TokenStream, dtype):
    inverse = jax.lax.rsqrt(jnp.square(stream.x).mean(-1, keepdims=True) + stream.eps)
    normal, (weights, number) = stream.x * inverse, stream.norm
    return (normal * weights[number].astype(jnp.float32)).astype(dtype)


def _turned(x, angles: Angles):
    """Turned heads [R, C], float32."""
    heads = x.astype(jnp.float32).reshape(len(x), -1, angles.head_dim)
    # a permutation of numbers with signs: exact in float32
    turn = jnp.asarray(angles.turn(angles.head_dim))
    turned = jnp.matmul(heads, turn, precision=jax.lax.Precision.HIGHEST)
    found = heads * angles.cos[:, None] + turned * angles.sin[:, None]
    return found.reshape(x.shape)
