"""What the kernels that choose tokens have in common: numbers as operands, and what a call costs,
for compilers and for models of compiled programs."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.estimates import PER_VECTOR_OPERATION

BITS = 32  # of a threshold, each found in a pass over the row
PER_PASS = 3  # compare, select, add
ONCE = 8  # temperature, guidance, order, noise, largest


def numbers(tau, strength) -> tuple:
    """As operands, float32 [1] each; None stays None."""
    return jax.tree.map(lambda a: jnp.reshape(a, 1).astype(jnp.float32), (tau, strength))


def scalars(refs) -> tuple:
    """Tau and strength from references to `numbers`."""
    return jax.tree.map(lambda ref: ref[0], refs)


def estimate(logits, noise, top_k: int, top_p: float) -> pl.CostEstimate:
    """Of a call for these arrays; see `api.sample`."""
    likely = 0 < top_p < 1
    searches = (0 < top_k < noise.shape[-1]) + likely
    operations = noise.size * (searches * BITS * PER_PASS + ONCE)
    return pl.CostEstimate(
        flops=operations * PER_VECTOR_OPERATION,
        transcendentals=noise.size * likely,
        bytes_accessed=4 * (logits.size + noise.size + noise.size // noise.shape[-1]),
    )
