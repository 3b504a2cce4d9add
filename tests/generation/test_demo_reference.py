"""The real demo checkpoint, ported in float32 and generated, against the original's own pictures.

Skipped where the PyTorch files are not beside the repository; what ships is their bfloat16 port.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import varjax
from ported_weights.configurations import PublishedModel
from ported_weights.convert import convert
from tests import models_under_test as models

pytestmark = pytest.mark.usefixtures("optimized")


@pytest.fixture(scope="module")
def demo(shared_dir, tmp_path_factory):
    source, out = shared_dir / "data" / "demo_var_torch", tmp_path_factory.mktemp("demo") / "port"
    if not source.is_dir():
        pytest.skip("the PyTorch files of the demo are not part of the repository")
    published = PublishedModel(
        model="var-custom",
        source=str(source / "var.pth"),
        tokenizer_source=str(source / "vae.pth"),
        config=str(source / "config_var.json"),
        tokenizer_config=str(source / "config_vae.json"),
    )
    convert(published, str(out), say=lambda line: None)
    with np.load(source / "reference.npz") as archive:
        reference = {name: archive[name] for name in archive.files}
    return varjax.load(out, "float32"), reference


@pytest.mark.parametrize("cfg", ["1.5", pytest.param("3", marks=pytest.mark.slow)])
def test_greedy_pictures(demo, cfg):
    model, reference = demo
    labels = reference["labels"]
    generator = models.greedy_generator(model, cfg=float(cfg), batch_size=len(labels))
    results, _ = generator.run_batch(labels, np.arange(len(labels)))
    np.testing.assert_array_equal(results["tokens"], reference[f"tokens_cfg{cfg}"])
    for name, expected, limit in (
        ("code_map", f"f_hat_cfg{cfg}", models.CODE_MAP),
        ("images", f"image_cfg{cfg}", models.IMAGE),
    ):
        found = np.moveaxis(np.asarray(results[name]), -1, 1)
        np.testing.assert_allclose(found, reference[expected], rtol=0, atol=limit)


def test_reconstructions(demo):
    model, reference = demo
    images = reference["recon_input_u8"]
    images = np.moveaxis(images, 1, -1) if images.shape[1] == 3 else images
    codec = model.codec
    given = jnp.asarray(images / 127.5 - 1, jnp.float32)
    tokens = jax.jit(lambda codec, images: codec.images_to_tokens(images))(codec, given)
    np.testing.assert_array_equal(tokens, reference["recon_tokens"])
    pictures = jax.jit(lambda codec, tokens: codec.tokens_to_images(tokens))(codec, tokens)
    pictures = (np.moveaxis(np.asarray(pictures), -1, 1) + 1) / 2
    found, expected = pictures, reference["recon_image"]
    if expected.min() < -0.01:  # stored in [-1, 1]
        found = found * 2 - 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=models.IMAGE)
