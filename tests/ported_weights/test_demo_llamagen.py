"""The embedded checkpoint that draws token by token, and names of embedded checkpoints."""

import numpy as np
import pytest

import varjax
from experiments.judges import Judges
from varjax.errors import UserError
from varjax.evaluation import extractors
from varjax.io.images import to_uint8
from varjax.model import describe
from varjax.models import registry
from varjax.storage import checkpoint, manifest


def test_the_embedded_demo_that_draws_tokens():
    folder = checkpoint.demo_directory("demo-llamagen")
    content = manifest.read(folder, registry.FAMILIES)
    assert content["family"] == "llamagen" and content["dtype"] == "bfloat16"
    assert (
        content["class_names"]
        == manifest.read(checkpoint.demo_directory(), registry.FAMILIES)["class_names"]
    )
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert size < 12e6


def test_names_of_embedded_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = describe("demo-llamagen")
    assert model.name == "demo-llamagen" and model.draws_tokens and model.config.image_tokens == 256
    assert describe("demo").name == describe().name == "demo"
    (tmp_path / "demo-llamagen").mkdir()  # a folder of the user's comes first
    with pytest.raises(UserError, match="demo-llamagen"):
        describe("demo-llamagen")
    (tmp_path / "demo").mkdir()
    assert describe().name == "demo"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("demo-llamagen", 0.9), ("demo-eight", 0.75)])
def test_pictures_are_of_their_classes(name, least):
    """By the embedded classifier; 176 of 176 and 471 of 528 pictures were, with the recommended
    sampling."""
    model = varjax.load(name, "float32")
    judges = Judges(classifier=extractors.classifier_of(model))
    labels = np.arange(44)
    pictures = varjax.generate(model, labels=list(labels), seed=1, batch_size=44)
    assert judges.agreement(to_uint8(pictures), labels).mean() > least
