"""A codebook that does not collapse: first codes from k-means, seldom used ones placed anew.

Letters: n vectors, V codes, C channels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

JITTER = 1e-3  # relative noise, so that repeated vectors do not make identical codes


def _nearest(vectors: Float[Array, "n C"], codes: Float[Array, "V C"]) -> Int[Array, " n"]:
    distances = jnp.square(codes).sum(-1) - 2 * vectors @ codes.T
    return jnp.argmin(distances, axis=-1)


def _samples(key: Array, vectors: Float[Array, "n C"], count: int) -> Float[Array, "V C"]:
    """`count` random vectors, different ones where there are enough, with a little noise."""
    pick, noise = jax.random.split(key)
    chosen = jax.random.choice(pick, len(vectors), (count,), replace=count > len(vectors))
    return vectors[chosen] + JITTER * vectors.std() * jax.random.normal(
        noise, (count, vectors.shape[1])
    )


def k_means(
    key: Array, vectors: Float[Array, "n C"], num_codes: int, iterations: int = 12
) -> Float[Array, "V C"]:
    """Codes after rounds of k-means; one that loses all its vectors restarts at a random vector."""
    start, key = jax.random.split(key)

    def improve(codes, key):
        owner = _nearest(vectors, codes)
        counts = jnp.zeros(num_codes).at[owner].add(1)
        sums = jnp.zeros_like(codes).at[owner].add(vectors)
        means = sums / jnp.maximum(counts, 1)[:, None]
        return jnp.where(counts[:, None] > 0, means, _samples(key, vectors, num_codes)), None

    codes, _ = jax.lax.scan(
        improve, _samples(start, vectors, num_codes), jax.random.split(key, iterations)
    )
    return codes


def reseed(
    key: Array,
    codes: Float[Array, "V C"],
    usage: Float[Array, " V"],
    vectors: Float[Array, "n C"],
    threshold: float = 0.05,
) -> tuple[Float[Array, "V C"], Array]:
    """Move codes used less than `threshold` times the mean usage to random vectors.

    Returns the codes and which of them moved, bool [V].
    """
    rare = usage < threshold * usage.mean()
    return jnp.where(rare[:, None], _samples(key, vectors, len(codes)), codes), rare


def perplexity(usage: Float[Array, " V"]) -> Float[Array, ""]:
    """exp(entropy) of the usage: how many codes are used as if equally often."""
    share = usage / jnp.maximum(usage.sum(), 1)
    return jnp.exp(-jnp.where(share > 0, share * jnp.log(jnp.maximum(share, 1e-12)), 0).sum())
