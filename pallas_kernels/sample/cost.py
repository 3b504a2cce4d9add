"""What a kernel that chooses tokens costs, for compilers."""

from jax.experimental import pallas as pl

BITS = 32  # of a threshold, each found in a pass over the row
PER_PASS = 3  # compare, select, add
ONCE = 8  # temperature, guidance, order, noise, largest


def estimate(logits, noise, top_k: int, top_p: float) -> pl.CostEstimate:
    """Of a call for these arrays; see `api.sample`."""
    likely = 0 < top_p < 1
    searches = (0 < top_k < noise.shape[-1]) + likely
    return pl.CostEstimate(
        flops=noise.size * (searches * BITS * PER_PASS + ONCE),
        transcendentals=noise.size * likely,
        bytes_accessed=4 * (logits.size + noise.size + noise.size // noise.shape[-1]),
    )
