"""Codes are found, and moved when they are not used."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import vqvae_trainer as codebook


def _clusters(count=6, each=50):
    centres = 5 * jax.random.normal(jax.random.key(0), (count, 3))
    noise = 0.05 * jax.random.normal(jax.random.key(1), (each, count, 3))
    return centres, (centres + noise).reshape(-1, 3)


def test_k_means_finds_clusters():
    centres, vectors = _clusters()
    codes = codebook.k_means(jax.random.key(2), vectors, 24)
    distance = jnp.linalg.norm(centres[:, None] - codes[None], axis=-1).min(1)
    assert float(distance.max()) < 0.1
    chex.assert_shape(codes, (24, 3))
    assert bool(jnp.isfinite(codes).all())


def test_k_means_with_fewer_vectors_than_codes():
    codes = codebook.k_means(jax.random.key(2), _clusters(2, 3)[1], 16)
    assert len(np.unique(codes, axis=0)) == 16


@pytest.mark.slow
def test_reseed_moves_only_rare_codes():
    _, vectors = _clusters()
    codes = 100 + jnp.zeros((8, 3))
    usage = jnp.array([50.0, 0, 60, 1, 40, 50, 0, 70])
    found, moved = codebook.reseed(jax.random.key(3), codes, usage, vectors)
    assert moved.tolist() == [False, True, False, True, False, False, True, False]
    chex.assert_trees_all_equal(found[~moved], codes[~moved])
    nearest = jnp.linalg.norm(found[moved][:, None] - vectors, axis=-1).min(1)
    assert float(nearest.max()) < 0.05  # a vector plus a little noise


def test_perplexity():
    assert np.isclose(codebook.perplexity(jnp.ones(8)), 8)
    assert np.isclose(codebook.perplexity(jnp.array([9.0, 0, 0])), 1)
