"""The classifier: its configuration, what it computes, and the one that comes with the demo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.evaluation import extractors
from experiments.evaluation.extractors import CompiledNetwork
from experiments.judges import feature_distance
from varjax.core.errors import UserError
from varjax.models import loading as models
from varjax.models.judges.classifier import Classifier, ClassifierConfig, check_size
from varjax.storage import checkpoint

TINY = ClassifierConfig(num_classes=3, image_size=16, widths=(8, 16))


def test_features_and_logits():
    """Features are not negative; a shift of all values of a group changes nothing."""
    network = Classifier(TINY, rngs=nnx.Rngs(0))
    images = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 16, 16, 3)), jnp.float32)
    run = jax.jit(lambda network, images: network.features(images))
    features = run(network, images)
    assert features.shape == (2, 16) and (features >= 0).all()
    logits = jax.jit(lambda network, images: network(images))(network, images)
    np.testing.assert_allclose(logits, network.logits(features), rtol=1e-6)
    alone = run(network, images[:1])
    np.testing.assert_allclose(alone, features[:1], rtol=1e-5, atol=1e-6)


def test_feature_distance():
    a = np.array([[1.0, 0, 0], [1, 1, 0], [0, 0, 0], [2, 2, 0]])
    b = np.array([[0.0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]])
    np.testing.assert_allclose(feature_distance(a, b), [1, 0, 0, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"widths": [8, 12]}, "must be a multiple of 8"),
        ({"image_size": 2}, "must be at least 4"),
        ({"class_names": ["a"]}, "1 class_names for 3 classes"),
        ({"class_names": [1, 2, 3]}, "must list texts"),
        ({"depth": 3}, "unknown name 'depth'"),
    ],
)
def test_wrong_configurations(changes, problem):
    given = {"num_classes": 3, "image_size": 16, "widths": [8, 16]}
    assert ClassifierConfig.from_published(given) == TINY
    assert ClassifierConfig.from_published(TINY.to_published()) == TINY
    with pytest.raises(UserError, match=problem):
        ClassifierConfig.from_published(given | changes)


# --- the one of the demo --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo():
    return extractors.open_classifier()


def test_it_is_small_and_knows_the_demos_classes(demo):
    folder = checkpoint.embedded(*extractors.DEMO_CLASSIFIER)
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 2**20
    model = models.describe()
    assert demo.module.config.class_names == tuple(model.class_names)
    assert extractors.classifier_of(model).identity == demo.identity
    assert extractors.classifier_of(models.describe("var-d16")) is None
    with pytest.raises(UserError, match="32x64 pixels: the classifier was trained on .* 64x64"):
        check_size(demo.module.config, 32, 64)


def test_it_knows_fruit(demo, shared_dir):
    """97 % at least of 256 validation pictures; the README says how many of all."""
    from experiments.evaluation.pictures import PackedPictures

    found = PackedPictures(shared_dir / "data" / "fruits64" / "val.npz")
    program, right = CompiledNetwork(demo, found.size, 64), 0
    for first in range(0, 256, 64):
        (arrays,) = program.over(iter([(found.read(first, first + 64),)]))
        right += (arrays["logits"].argmax(1) == found.labels[first : first + 64]).sum()
    assert right >= 0.97 * 256
