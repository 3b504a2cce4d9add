"""The network of FID, converted, against the original's features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.experiments.evaluation import recipe
from varjax.core.errors import UserError
from varjax.models.judges.inception import CONVOLUTIONS, SPATIAL_SIDE, InceptionConfig

IMAGES = (0, 1, 2, 7, 8)


@pytest.fixture(scope="module")
def outputs(inception):
    """{path: features} of the pictures of the fixtures."""
    run = jax.jit(lambda module, x: module(x))
    known, found = recipe.arrays("inception"), {}
    for path, protocol in recipe.PATHS.items():
        images = [jnp.asarray(known[f"image_{i}"][None]) for i in IMAGES]
        x = jnp.concatenate([protocol.normalise(protocol.resized(image)) for image in images])
        found[path] = jax.device_get(run(inception.module, x))
    return found


def known(name: str) -> np.ndarray:
    return recipe.arrays("inception")[f"out.{name}"]


@pytest.mark.parametrize("path", recipe.PATHS)
def test_features(outputs, path):
    found = outputs[path]["pool"]
    np.testing.assert_allclose(found, known(f"{path}_feat"), atol=1e-4)


def test_logits_and_spatial_features(outputs, inception):
    bias = np.asarray(inception.module.fc.bias[...])
    unbiased = outputs["tf1"]["logits"]
    np.testing.assert_allclose(unbiased, known("tf1_logits_unbiased"), atol=5e-4)
    np.testing.assert_allclose(unbiased + bias, known("tf1_logits"), atol=5e-4)
    np.testing.assert_allclose(outputs["pfid"]["logits"] + bias, known("pfid_logits"), atol=5e-4)
    spatial = outputs["tf1"]["spatial"].reshape(-1, SPATIAL_SIDE, SPATIAL_SIDE, 7)
    np.testing.assert_allclose(spatial, known("tf1_spatial"), atol=4e-4)


def test_configurations():
    widths = [8] * len(CONVOLUTIONS)
    config = InceptionConfig.from_published({"widths": widths, "num_classes": 5})
    assert InceptionConfig.from_published(config.to_published()) == config
    assert config.block_width("Mixed_7c", 0) == 6 * 8
    for wrong, problem in (
        ({"widths": widths[1:]}, "93 widths for 94"),
        ({"widths": [0, *widths[1:]]}, "width of Conv2d_1a_3x3 is 0"),
        ({"widths": [4] * len(widths)}, "Mixed_6d.branch1x1 is 4, it must be at least 7"),
        ({"widths": widths, "num_classes": 0}, "num_classes is 0"),
    ):
        with pytest.raises(UserError, match=problem):
            InceptionConfig.from_published(wrong)
