"""Plain JAX ranks: the definition of correct, runs on every platform."""

import jax
import jax.numpy as jnp

from pallas_kernels import target


def rank(score, tie, among, part):
    """See `api.rank`."""
    # Comparisons that several ranks have in common are not kept for all of them, a matrix [K, K]
    # per head, but made again, which costs nothing beside reading them.
    score, tie, among, part = jax.lax.optimization_barrier((score, tie, among, part))
    below = tie[..., None, :] < tie[..., None]
    if score is not None:
        other, own = score[..., None, :], score[..., None]
        below = (other < own) | ((other == own) & below)
    if part is not None:
        below &= part[..., None, :] == part[..., None]
    lower = among[..., None, :] & below
    if target.platform() != "gpu" or lower.shape[-1] >= 2**15:
        return lower.sum(-1, dtype=jnp.int32)
    # a GPU waits for memory: ranks are kept as numbers of 16 bits until they are used
    found = jax.lax.optimization_barrier(lower.sum(-1, dtype=jnp.int16))
    return found.astype(jnp.int32)
