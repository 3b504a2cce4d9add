"""The nearest of a codebook's vectors, in float32 with full-precision products."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.projection import l2_normalize

HIGHEST = jax.lax.Precision.HIGHEST


def nearest(
    z: Float[Array, "... C"], codes: Float[Array, "V C"], *, by_angle: bool
) -> Int[Array, "..."]:
    """int32 index of the nearest code: the one of smallest distance, or with `by_angle` of largest
    cosine. Among equally near codes it is the first."""
    z, codes = z.astype(jnp.float32), codes.astype(jnp.float32)
    if by_angle:
        z, codes = l2_normalize(z), l2_normalize(codes)
        similarity = jnp.einsum("...c,vc->...v", z, codes, precision=HIGHEST)
        return jnp.argmax(similarity, axis=-1).astype(jnp.int32)
    products = jnp.einsum("...c,vc->...v", z, codes, precision=HIGHEST)
    # |z|^2 is the same for every code and left out
    return jnp.argmin(jnp.square(codes).sum(-1) - 2 * products, axis=-1).astype(jnp.int32)
