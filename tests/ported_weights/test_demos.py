"""The embedded checkpoints, their names, and the PyTorch original of one where it is at hand."""

import numpy as np
import pytest

import varjax
from experiments.evaluation import extractors
from experiments.judges import Judges
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.models.loading import describe
from varjax.storage import checkpoint, manifest
from varjax.storage.pictures import to_uint8


@pytest.mark.parametrize(
    ("name", "family", "count"),
    [
        ("demo", "var", 5_386_211),
        ("demo-eight", "var", 5_405_667),
        ("demo-llamagen", "llamagen", 0),
    ],
)
def test_embedded_checkpoints(name, family, count):
    """Small, in bfloat16, of the same classes; those of VAR have the same sampling."""
    folder = checkpoint.embedded(checkpoint.DEMOS[name], "model.json")
    content = manifest.read_manifest(folder, registry.FAMILIES)
    assert (content["family"], content["dtype"]) == (family, "bfloat16")
    assert content["num_classes"] == len(content["class_names"]) == 44
    if family == "var":
        sampling = {"cfg": 1.5, "top_k": 100, "top_p": 0.95, "more_smooth": False}
        assert content["parameters"] == count and content["sampling"] == sampling
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 12e6


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
