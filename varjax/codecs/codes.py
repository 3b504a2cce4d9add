"""Codes of a codebook: the nearest ones, and maps of them one after the other."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.projection import l2_normalize
from varjax.core.maps import HIGHEST


def flatten_maps(maps: Sequence[Shaped[Array, "B _ _ C"]]) -> Shaped[Array, "B L C"]:
    """Positions of all maps, one map after the other, each row-major."""
    rows = [m.reshape(m.shape[0], m.shape[1] * m.shape[2], m.shape[3]) for m in maps]
    return jnp.concatenate(rows, axis=1)


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
