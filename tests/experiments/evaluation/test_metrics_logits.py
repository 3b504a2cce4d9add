"""KL divergence of logits against NumPy in float64."""

import chex
import numpy as np
import pytest

from experiments.evaluation.metrics import image_kl, kl_divergence


def oracle(a, b):
    p, q = (np.exp(x - x.max(-1, keepdims=True), dtype=np.float64) for x in (a, b))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * np.log(p / q)).sum(-1)


def logits(seed, scale=3.0):
    return scale * np.random.default_rng(seed).normal(size=(2, 5, 32)).astype(np.float32)


def test_it_is_the_definition_and_ignores_constants():
    a, b = logits(0), logits(1)
    chex.assert_trees_all_close(kl_divergence(a, b), oracle(a, b), rtol=1e-5)
    chex.assert_trees_all_close(image_kl(a, b), kl_divergence(a, b + 100).mean(1), rtol=2e-4)
    assert kl_divergence(a, b)[0, 0] != pytest.approx(float(kl_divergence(b, a)[0, 0]))


def test_zero_for_the_same_and_never_negative():
    a = logits(0, scale=20)
    assert (image_kl(a, a) == 0).all()
    assert (np.asarray(kl_divergence(a, a + np.float32(1e-5))) >= 0).all()


def test_what_the_reference_rules_out_counts_nothing():
    a, b = np.array([0.0, -np.inf], np.float32), np.array([0.0, 0.0], np.float32)
    assert float(kl_divergence(a, b)) == pytest.approx(np.log(2), rel=1e-6)
    assert np.isposinf(kl_divergence(b, a))
