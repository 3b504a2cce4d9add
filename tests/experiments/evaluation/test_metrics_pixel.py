"""PSNR and SSIM against NumPy written from the definitions, token agreement."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.evaluation.metrics import psnr, ssim, token_agreement


def pairs(count=3, height=20, width=16):
    rng = np.random.default_rng(0)
    a = rng.uniform(size=(count, height, width, 3)).astype(np.float32)
    noise = rng.normal(size=a.shape) * np.array([0.01, 0.1, 0.3])[:count, None, None, None]
    return a, np.clip(a + noise, 0, 1).astype(np.float32)


def ssim_oracle(a, b, side):
    """Wang et al. 2004, equation 13, window by window in float64."""
    x = np.arange(side) - (side - 1) / 2
    window = np.exp(-(x**2) / (2 * 1.5**2))
    window = np.outer(window, window)[..., None] / window.sum() ** 2
    values = []
    for top in range(a.shape[0] - side + 1):
        for left in range(a.shape[1] - side + 1):
            p, q = (z[top : top + side, left : left + side].astype(np.float64) for z in (a, b))
            mp, mq = (window * p).sum((0, 1)), (window * q).sum((0, 1))
            vp, vq = ((window * z**2).sum((0, 1)) - m**2 for z, m in ((p, mp), (q, mq)))
            cov = (window * p * q).sum((0, 1)) - mp * mq
            c1, c2 = 0.01**2, 0.03**2
            values.append((2 * mp * mq + c1) * (2 * cov + c2))
            values[-1] /= (mp**2 + mq**2 + c1) * (vp + vq + c2)
    return np.mean(values)


def test_psnr_is_per_image():
    a, b = pairs()
    expected = -10 * np.log10(np.square(a.astype(np.float64) - b).mean((1, 2, 3)))
    chex.assert_trees_all_close(psnr(a, b), expected, atol=1e-3)  # float32 sums, dB
    chex.assert_shape(psnr(jnp.asarray(a), b), (3,))


@pytest.mark.parametrize("height, width, side", [(20, 16, 11), (11, 11, 11), (8, 9, 8), (3, 5, 3)])
def test_ssim_is_per_image(height, width, side):
    a, b = pairs(height=height, width=width)
    expected = np.array([ssim_oracle(p, q, side) for p, q in zip(a, b, strict=True)])
    chex.assert_trees_all_close(ssim(a, b), expected, atol=2e-5)  # float32 variances as differences
    chex.assert_trees_all_close(ssim(a, a), 1.0, atol=1e-6)


def test_token_agreement():
    a = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert token_agreement(a, a).tolist() == [1.0, 1.0]
    assert token_agreement(a, np.where(a > 6, 0, a)).tolist() == [1.0, 0.5]
    bits = np.repeat(a[..., None], 2, -1)
    assert token_agreement(bits, bits * [1, 0]).tolist() == [0.5, 0.5]
