"""What networks judge in `run --compare`, `sweep` and `report`: LPIPS, class agreement, distance of
features."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from flax import nnx

from experiments.evaluation import extractors
from experiments.evaluation.extractors import CompiledNetwork
from experiments.report import page, sweep_files
from experiments.sweep import tables
from tests import models_under_test as models
from tests.experiments.evaluation import recipe
from varjax.models.judges import JUDGES
from varjax.models.judges.classifier import Classifier, ClassifierConfig
from varjax.storage import checkpoint


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """(flags of a checkpoint with a classifier of its own, 16x16 pixels; LPIPS on VGG)."""
    folder = tmp_path_factory.mktemp("judged")
    shutil.copytree(models.checkpoint_folder("b_k6_sharedaln"), folder / "model")
    classes = json.loads((folder / "model" / "model.json").read_text())["num_classes"]
    config = ClassifierConfig(num_classes=classes, image_size=16, widths=(8, 16))
    parts = {"classifier": Classifier(config, rngs=nnx.Rngs(3))}
    checkpoint.save(folder / "model" / "classifier", JUDGES.parts["classifier"], parts)
    return f"--checkpoint={folder / 'model'}", f"--lpips={recipe.converted('lpips-vgg')}"


def labels_found(folder, pictures):
    """What the checkpoint's classifier says of pictures."""
    network = extractors.open_classifier(folder / "classifier")
    (found,) = CompiledNetwork(network, (16, 16), 16).over(iter([(pictures,)]))
    return found["logits"].argmax(1), found["pool"].astype(np.float64)


@pytest.mark.slow
def test_run_sweep_and_report(call, judged, tmp_path):
    """Both commands find the same numbers; the page shows them."""
    model, lpips = judged
    shared = (model, lpips, "--labels=3,7,7,1", "--batch_size=2", "--segments=1")
    run = ("--policy=streaming", "--budget=0.3", "--compare", f"--out={tmp_path / 'run'}")
    status, text, err = call("run", *shared, *run)
    assert status == 0 and "class agreement" in text and "(full cache: " in text, err
    close = json.loads((tmp_path / "run" / "report.json").read_text())["fidelity"]
    with np.load(tmp_path / "run" / "samples.npz") as samples:
        guessed, ours = labels_found(_path(model), samples["arr_0"])
        assert close["class_agreement"] == (guessed == samples["arr_1"]).mean()
    assert close["lpips_network"]["name"] == "lpips vgg, version 0.1"
    assert close["classifier"]["name"].startswith("classifier of ")
    out = tmp_path / "sweep"
    sweep = ("--policies=streaming", "--budgets=0.3", "--samples=4", f"--out={out}")
    status, text, err = call("sweep", *shared, *sweep)
    assert status == 0 and "| LPIPS | class agreement | feature distance |" in text, err
    report, samples, _ = sweep_files.read_sweep(out)
    guessed, theirs = labels_found(_path(model), samples["full"])
    assert close["class_agreement_full"] == (guessed == [3, 7, 7, 1]).mean()
    cosine = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    # float32 features in batches of two here, of four there
    assert close["feature_distance"] == pytest.approx((1 - cosine).mean(), abs=1e-7)
    cell = report["cells"][0]
    for name in ("lpips", "class_agreement", "feature_distance"):
        assert cell["fidelity"][name] == pytest.approx(close[name], abs=1e-7)
        assert f"{name}_low" in cell["fidelity"] and len(cell["samples_fidelity"][name]) == 4
    assert report["reference"]["fidelity"] == {
        "class_agreement": pytest.approx(close["class_agreement_full"])
    }
    assert report["settings"]["classifier"]["sha256"] == close["classifier"]["sha256"]
    assert "no FID" in report["definitions"]["feature distance"]
    assert tables.header(tables.shown(tables.rows(report)))[8:11] == [
        "LPIPS",
        "class agreement",
        "feature distance",
    ]
    tile = next(page._tiles(cell, samples, 4))
    assert ", LPIPS 0." in tile["numbers"]
    status, _, err = call("report", f"--sweep={out}", f"--out={tmp_path / 'page.html'}")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert status == 0 and "class agreement, feature distance) is defined below" in text, err
    damaged = json.loads((out / "sweep.json").read_text())
    damaged["cells"][0]["samples_fidelity"]["lpips"] = [0.1]
    (out / "sweep.json").write_text(json.dumps(damaged))
    status, _, err = call("report", f"--sweep={out}", f"--out={tmp_path / 'more.html'}")
    assert status == 2 and "4 images of streaming, other counts" in err


def _path(flag):
    return pathlib.Path(flag.removeprefix("--checkpoint="))


def test_a_classifier_of_other_pictures(call, judged, tmp_path):
    """It is refused before anything is compiled, and so are weights that are none."""
    model, lpips = judged
    given = ("--policies=streaming", "--budgets=0.3", f"--out={tmp_path / 'out'}")
    status, _, err = call("sweep", model, *given, "--lpips=nowhere")
    assert status == 2 and "--lpips=nowhere: there is no folder nowhere" in err
    shutil.copytree(_path(model), tmp_path / "model")
    own = tmp_path / "model" / "classifier"
    for side, problem in ((32, "was trained on pictures of 32x32"), (16, "it knows 4 classes")):
        shutil.rmtree(own)
        parts = {"classifier": Classifier(_config(side), rngs=nnx.Rngs(0))}
        checkpoint.save(own, JUDGES.parts["classifier"], parts)
        for command in (("sweep", *given), ("run", "--compare", given[-1])):
            status, _, err = call(command[0], f"--checkpoint={tmp_path / 'model'}", *command[1:])
            assert status == 2 and problem in err, err
    assert not (tmp_path / "out").exists()


def _config(side):
    return ClassifierConfig(num_classes=4, image_size=side, widths=(8, 16))
