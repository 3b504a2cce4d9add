"""LPIPS, converted with heads in torch's old format, against the original's distances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.evaluation.extractors import open_lpips
from tests.experiments.evaluation import recipe
from varjax.core.errors import UserError
from varjax.models.judges import lpips

PAIRS = {"alex": range(8), "vgg": range(6)}  # the last two have 96x128 pixels


@pytest.fixture(scope="module", params=["alex", "vgg"])
def network(request):
    return open_lpips(str(recipe.converted(f"lpips-{request.param}")))


def test_distances(network):
    """Per layer and in all."""
    net, known = network.module.config.net, recipe.arrays("lpips")
    run = jax.jit(network.apply)
    groups = [[i for i in PAIRS[net] if i < 6], [i for i in PAIRS[net] if i >= 6]]
    for group in filter(None, groups):
        a, b = (jnp.stack([known[f"{x}_{i}"] for i in group]) for x in "ab")
        layers = np.asarray(run(network.module, a, b)["layers"])
        exact = known[f"{net}_lpips_layers_f32"][group]
        np.testing.assert_allclose(layers, exact, rtol=5e-5, atol=1e-8)
        total = known[f"{net}_lpips_f32"][group]
        np.testing.assert_allclose(layers.sum(1), total, rtol=2e-5, atol=1e-8)


def test_small_pictures_are_refused(network):
    side = lpips.SMALLEST[network.module.config.net]
    small, enough = (jnp.zeros((1, side - 1 + i, 64, 3)) for i in range(2))
    with pytest.raises(UserError, match=f"needs at least {side}"):
        network.module.activations(small)
    shapes = jax.eval_shape(network.module.activations, enough)
    assert all(min(x.shape) > 0 for x in shapes)


def test_configurations():
    config = lpips.LPIPSConfig.from_published({"net": "alex", "widths": [1, 2, 3, 4, 5]})
    assert lpips.LPIPSConfig.from_published(config.to_published()) == config
    for wrong, problem in (
        ({"net": "squeeze", "widths": [1]}, "unknown LPIPS network 'squeeze'"),
        ({"net": "vgg", "widths": [1]}, "1 widths for 13"),
        ({"net": "alex", "widths": [1, 2, 3, 4, 0]}, "width is 0"),
    ):
        with pytest.raises(UserError, match=problem):
            lpips.LPIPSConfig.from_published(wrong)
    assert lpips.batch_size(config, 4096, 4096) >= 1
