"""Models that draw token by token through the commands."""

import json

import numpy as np
import pytest

from tests import models_under_test as models
from tests.generation import test_llamagen_parity as parity


@pytest.fixture(scope="module")
def classes():
    return f"--checkpoint={models.checkpoint_folder('llamagen_c2i')}"


def test_run(call, classes, tmp_path):
    """The original's tokens and logits, in the arrays of the interface."""
    arrays, out = models.llamagen_fixture("gpt_c2i_gen"), tmp_path / "out"
    labels = ",".join(map(str, arrays["class_ids"]))
    flags = f"--labels={labels} --cfg={arrays['cfg_scale']} --greedy --matmul_precision=highest"
    status, text, err = call("run", classes, *flags.split(), "--save_arrays", f"--out={out}")
    assert status == 0, err
    assert "allocated KV" in text and "100.0%" in text
    with np.load(out / "arrays.npz") as found:
        np.testing.assert_array_equal(found["tokens"], arrays["tokens"])
        parity.close(found["logits"], parity.mixed(arrays), parity.LOGITS)
        kinds = {name: (found[name].dtype.name, found[name].shape) for name in found.files}
    assert kinds == {
        "tokens": ("int32", (2, 64)),
        "logits": ("float32", (2, 64, 256)),
        "code_map": ("float32", (2, 8, 8, 8)),
        "images": ("float32", (2, 3, 32, 32)),
    }
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["segments_used"] == [] and report["layers_used"] == "unroll"
    assert report["kv"]["allocated_bytes"] == report["kv"]["dense_bytes"]
    assert report["attention_flops_per_image"]["observation"] == 0
    status, text, err = call("evaluate", f"--samples={out}", f"--full={out}", f"--out={out}/same")
    assert status == 0, err
    found = json.loads((out / "same" / "metrics.json").read_text(encoding="utf-8"))
    assert found["identical_images"] == 2 and found["token_agreement"] == 1


@pytest.mark.parametrize(
    ("verb", "flags", "message"),
    [
        ("run", ["--policy=heatkv", "--budget=0.5"], "heatkv"),
        ("run", ["--policy=headkv", "--budget=0.02"], "smallest feasible budget"),
        ("run", ["--policy=compose", "--budget=0.02"], "smallest feasible budget is 0.0469\n"),
        ("run", ["--policy=compose", "--policy_args=allocate=heatkv"], "heatkv"),
        ("run", ["--policy=table"], "policy 'table' needs a file"),
        ("run", ["--policy=headkv", "--policy_args=period=0"], "period"),
        ("run", ["--policy=headkv", "--policy_args=window=0"], "window"),
        ("run", ["--policy=headkv", "--policy_args=window=64"], "window"),
        ("run", ["--labels=20"], "labels 20 are outside the model's 20 classes"),
        ("run", ["--top_k=257"], "top_k=257"),
        ("run", ["--segments=2"], "have no scales to cut"),
        ("run", ["--given_scales=65"], "0 to 64 tokens"),
        ("sweep", ["--policies=hack"], "hack"),
        ("calibrate", ["--save={out}"], "no policy for such models uses a calibration"),
    ],
)
def test_bad_input(call, classes, tmp_path, verb, flags, message):
    """Exit status 2, one line, nothing written."""
    out = tmp_path / "out"
    flags = [flag.format(out=out) for flag in flags]
    flags += [] if verb == "calibrate" else [f"--out={out}"]
    status, _, err = call(verb, classes, *flags)
    assert status == 2 and message in err and len(err.strip().splitlines()) == 1, err
    assert not list(tmp_path.iterdir())


def test_policy_of_tokens_on_scales(call, tmp_path):
    checkpoint = f"--checkpoint={models.checkpoint_folder('b_k6_sharedaln')}"
    status, _, err = call("run", checkpoint, "--policy=rkv", f"--out={tmp_path / 'out'}")
    assert status == 2 and "rkv" in err and not list(tmp_path.iterdir())
