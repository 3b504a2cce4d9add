"""Operands that the kernels that choose tokens share, and the estimate of a call's cost."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.estimates import PER_VECTOR_OPERATION

BITS = 32  # of a threshold; each bit takes a pass over the row
PER_PASS = 3  # operations per number and pass: compare, select, add
ONCE = 8  # operations per number in all: temperature, guidance, order, noise, largest


def numbers(tau, strength) -> tuple:
    """Tau and strength as operands, float32 [1] each; None stays None."""
    return jax.tree.map(lambda a: jnp.reshape(a, 1).astype(jnp.float32), (tau, strength))


def scalars(refs) -> tuple:
    """Tau and strength from references to `numbers`."""
    return jax.tree.map(lambda ref: ref[0], refs)


def estimate(logits, noise, top_k: int, top_p: float) -> pl.CostEstimate:
    """The cost of a call for these arrays; see `api.sample`."""
    likely = 0 < top_p < 1
    searches = (0 < top_k < noise.shape[-1]) + likely
    operations = noise.size * (searches * BITS * PER_PASS + ONCE)
    return pl.CostEstimate(
        flops=operations * PER_VECTOR_OPERATION,
        transcendentals=noise.size * likely,
        bytes_accessed=4 * (logits.size + noise.size + noise.size // noise.shape[-1]),
    )
