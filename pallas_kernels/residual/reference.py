"""Sums, norms and rows in 8 bits in plain JAX: the definition of correct."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import target
from pallas_kernels.projection import layer_norm, modulate
from pallas_kernels.residual.operands import TINY, Activation, Bits8, Branch, Norm, Rows8, Sums


def add_and_normalize(stream, branch: Branch | None, norm: Norm):
    """See `api.add_and_normalize`."""
    stream = stream if branch is None else branch.added_to(stream)
    scale, shift = (norm.vectors.at(place) for place in (norm.scale, norm.shift))
    found = modulate(layer_norm(stream, norm.eps), scale, shift).astype(norm.dtype)
    return (found if norm.bits is None else rows_8(found, norm.bits)), stream


def to_8_bits(sums: Sums, bits: Bits8, activation: Activation | None):
    """See `api.to_8_bits`."""
    return rows_8(sums.finished(), bits, activation)


def rows_8(
    x: Float[jax.Array, "*rows D"],
    bits: Bits8,
    activation: Activation | None = None,
    axis: str | None = None,
) -> Rows8:
    """Rows in 8 bits.

    activation: applied to `x` first.
    axis: of the mesh, if `D` is divided over its devices: they scale a row alike.
    """
    dtype, run = x.dtype, activation or (lambda x: x)
    magnitude = jnp.abs(run(x).astype(jnp.float32)).max(-1, keepdims=True)
    magnitude = magnitude if axis is None else jax.lax.pmax(magnitude, axis)
    magnitude = jnp.maximum(magnitude, TINY)
    if activation and target.platform() == "gpu":
        # computed twice: XLA would write what it gives, for the kernel that follows to read
        x = jax.lax.optimization_barrier(x)
    numbers = bits.rounded(run(x).astype(jnp.float32) * (bits.largest / magnitude))
    return Rows8(numbers, magnitude / bits.largest, dtype)
