"""The three ways to 299x299 pixels, against arrays of the originals and against Pillow."""

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.experiments.evaluation import recipe

TOLERANCES = {"pfid": 2e-5, "tf1": 5e-3, "clean": 1e-3}  # pfid on values 0..1


def resized(image: np.ndarray, path: str) -> np.ndarray:
    found = np.asarray(recipe.PATHS[path].resized(jnp.asarray(image[None])))[0]
    return found.clip(0, 255) if path == "clean" else found / (255 if path == "pfid" else 1)


@pytest.mark.parametrize("image", [0, 4, 7])
@pytest.mark.parametrize("path", recipe.PATHS)
def test_pictures_are_resized_as_by_the_originals(path, image):
    """64x64, 100x80 and 256x256 pixels; at some rows and columns, and the mean of all."""
    known = recipe.arrays("inception")
    found, at = resized(known[f"image_{image}"], path), known["idx"]
    np.testing.assert_allclose(found[at][:, at], known[f"{path}_{image}"], atol=TOLERANCES[path])
    mean = known[f"sum_{image}"][list(recipe.PATHS).index(path)]
    np.testing.assert_allclose(found.astype(np.float64).mean((0, 1)), mean, atol=TOLERANCES[path])


@pytest.mark.parametrize("size", [(384, 512), (31, 700), (299, 64), (1, 1024), (298, 300)])
def test_the_clean_path_is_pillows(size):
    """It shrinks with antialiasing, and leaves an axis that is right alone."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    channels = (Image.fromarray(image[..., c].astype(np.float32)) for c in range(3))
    pillow = [np.asarray(c.resize((299, 299), Image.Resampling.BICUBIC)) for c in channels]
    np.testing.assert_allclose(
        resized(image, "clean"), np.stack(pillow, -1).clip(0, 255), atol=1e-3
    )


@pytest.mark.parametrize("path", recipe.PATHS)
def test_values_that_the_network_sees(path):
    """Pictures that fit are not touched; the range is that of the original."""
    image = np.arange(256, dtype=np.uint8)[:, None].repeat(299 * 299 * 3 // 256 + 1, 1)
    image = image.reshape(-1)[: 299 * 299 * 3].reshape(1, 299, 299, 3)
    protocol = recipe.PATHS[path]
    found = np.asarray(protocol.normalise(protocol.resized(jnp.asarray(image))))
    exact = image / 127.5 - 1 if path == "pfid" else (image - 128.0) / 128
    np.testing.assert_allclose(found, exact, atol=1e-6)
