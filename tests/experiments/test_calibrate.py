"""`experiments.calibrate`: one file that policies read, for one model and guidance only."""

import json

import pytest

from tests import models_under_test as models
from varjax.calibration import files as measured
from varjax.models.loading import load


@pytest.fixture(scope="module")
def folder():
    return models.checkpoint_folder("b_k6_sharedaln")


@pytest.fixture
def calibrated(folder, call, tmp_path_factory):
    """Written once, by the command."""
    path = tmp_path_factory.getbasetemp() / "calibration-test.json"
    if path.exists():
        return path
    status, out, err = call(
        "calibrate",
        f"--checkpoint={folder}",
        "--num_samples=2",
        "--stability=2",
        "--cfg=2",
        f"--save={path}",
    )
    assert status == 0, err
    assert "rank dispersion" in out and "4 images" in out
    return path


def test_file_reads_back(calibrated, folder):
    model = load(folder, "float32")
    found = measured.load(calibrated, model.geometry)
    assert found.guidance == 2 and found.num_samples == 4 and found.model == folder.name
    assert found.rank_dispersion.shape == (5,)
    derived = json.loads(calibrated.read_text())["derived"]
    assert set(derived) == {"scas", "cas", "cas_sinks", "attention_density"}


def run(call, folder, calibrated, *more):
    return call(
        "run",
        f"--checkpoint={folder}",
        "--policy=heatkv",
        "--budget=0.4",
        "--labels=1",
        f"--calibration={calibrated}",
        "--dry_run",
        *more,
    )


def test_serves_its_own_model_and_guidance(call, calibrated, folder):
    status, _, err = run(call, folder, calibrated, "--cfg=2")
    assert status == 0, err


@pytest.mark.parametrize(
    ("checkpoint", "cfg", "message"),
    [("b_k6_sharedaln", 3, "guidance cfg=2"), ("c_k5_nol2norm", 2, "another model")],
)
def test_refused_elsewhere(call, calibrated, checkpoint, cfg, message):
    status, _, err = run(call, models.checkpoint_folder(checkpoint), calibrated, f"--cfg={cfg}")
    assert status == 2 and message in err


def test_refused_for_other_weights_of_the_same_shape(call, calibrated, folder, tmp_path):
    content = json.loads(calibrated.read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content | {"model_digest": "0" * 64}))
    status, _, err = run(call, folder, other, "--cfg=2")
    assert status == 2 and "other weights" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--labels=1,2", "--num_samples=10"), "--labels and --num_samples exclude each other"),
        (("--seed=2147483647", "--stability=2"), "--seed=2147483647: choose 0 to 2147483646"),
        (("--checkpoint=var-d30",), "without weights"),
        (("--labels=99",), "outside the model's"),
        (("--save=/proc/x.json",), "cannot write /proc/x.json"),
    ],
)
def test_bad_input(refused, monkeypatch, flags, message):
    monkeypatch.setattr("experiments.calibrate.load_weights", lambda *a: pytest.fail("loaded"))
    refused("calibrate", message, "--save=x.json", *flags)
