"""Training of the classifier: it learns, resumes exactly, and its folder is one that evaluation
reads."""

import numpy as np
import pytest

from experiments.evaluation import extractors
from experiments.evaluation.extractors import CompiledNetwork
from experiments.training import classifier_trainer, data, session
from experiments.training.classifier_trainer import ClassifierStage
from tests.experiments.training.conftest import dies_at
from varjax.core.errors import UserError

EVERY = {"log_every": 5, "checkpoint_every": 10, "validate_every": 20, "image_size": 16}
EVERY |= {"patch_nums": (1, 2, 8), "classifier_steps": 30, "classifier_batch_size": 16}


@pytest.fixture(scope="module")
def whole(shared_tiny, tmp_path_factory):
    """(settings, folder of the network)."""
    settings, out = shared_tiny(**EVERY), tmp_path_factory.mktemp("run") / "whole"
    return settings, session.train(settings, "classifier", out, quiet=True)


@pytest.mark.slow
def test_it_learns_and_evaluation_reads_it(whole):
    settings, folder = whole
    network = extractors.open_classifier(folder)
    pictures = data.load(settings.data, 16)
    (found,) = CompiledNetwork(network, (16, 16), 64).over(iter([(pictures.train,)]))
    assert (found["logits"].argmax(1) == pictures.train_labels).mean() > 0.8
    assert found["pool"].shape == (len(pictures.train), 128)


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(whole, tmp_path):
    settings, folder = whole
    with dies_at(ClassifierStage, 25):
        session.train(settings, "classifier", tmp_path / "out", quiet=True)
    again = session.train(settings, "classifier", tmp_path / "out", quiet=True)
    ours, theirs = (extractors.open_classifier(f).identity["sha256"] for f in (again, folder))
    assert ours == theirs
    with pytest.raises(UserError, match="holds no training run to resume"):
        session.train(settings, "both", tmp_path / "out", quiet=True)


def test_pictures_are_shifted_with_their_edges_repeated():
    images = np.arange(16 * 16, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, 3).repeat(9, 0)
    found = classifier_trainer.shifted(images, np.random.default_rng(0))
    assert found.shape == images.shape
    wide = np.pad(images[0], ((1, 1), (1, 1), (0, 0)), mode="edge")
    places = [wide[i : i + 16, j : j + 16] for i in range(3) for j in range(3)]
    hits = {next(n for n, p in enumerate(places) if (p == image).all()) for image in found}
    assert len(hits) > 3
