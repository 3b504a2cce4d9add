"""`experiments.aot --learn`: wrong flags, the table, steps that are compiled."""

import json

import jax
import pytest

from experiments.aot import learning, worker
from experiments.aot.learning import LearningStep
from experiments.training.learner import Programs
from experiments.training.mesh import TrainingMesh
from pallas_kernels import chips
from tests import models_under_test as models
from tests.policies.test_every_policy import model_and_measurements
from varjax.models.loading import describe

LEARN = ("--model=infinity-2b", "--learn", "--target=h100")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*LEARN, "--policy=h2o"), "--policy decides how pictures are drawn, and --learn compiles"),
        ((*LEARN, "--largest_batch"), "--largest_batch decides how pictures are drawn"),
        ((*LEARN, "--mesh=data=8", "--batch_size=11"), "choose a multiple of 8"),
        ((*LEARN, "--mesh=model=4"), "unknown axis 'model' of a mesh"),
        ((*LEARN, "--mesh=data=4096", "--batch_size=4096"), "takes 4096 devices"),
    ],
)
def test_bad_input(refused, compilers, flags, message):
    refused("aot", message, *flags)


def test_table(call, compilers, monkeypatch, tmp_path):
    gathered = {"kind": "all-gather", "source": "jvp()/dot_general", "group": 8, "calls": 2.0}
    gathered |= {"bytes": 4096.0, "sent_bytes": 3584.0}
    compiled = {"status": "compiled", "batch_size": 64, "devices": 8, "parameter_bytes": 2**30}
    compiled |= {"peak_bytes": 2**31, "peak_of": "a step", "memory_bytes": 2**33, "fits": True}
    compiled |= {"aliased": True, "copies": {}, "loops_of_unknown_length": 0, "compile_s": 9.0}
    compiled |= {"flops": 1e12, "floor_s": 0.01, "floor_bound": "FLOPs", "floor_images_per_s": 6400}
    step = {"temporary_bytes": 2**30, "collectives": [gathered], "largest_temporaries": []}
    step |= {"kernels": 70.0, "kernels_by_operation": {"jvp()/tanh": 70.0}, "kernels_of_ours": {}}
    compiled["programs"] = {"a step": step}
    refused = {"status": "refused", "needed_bytes": 2**34, "error": "too large"}
    refused |= {"batch_size": 64, "memory_bytes": 2**33}
    found = {"tpu-v5p": compiled, "tpu-v5e": refused}
    monkeypatch.setattr(worker, "apart", lambda target, _: {"target": target, **found[target]})
    flags = ("--mesh=data=8", "--batch_size=64", f"--json={tmp_path / 'a.json'}", "--verbose")
    status, text, err = call("aot", *LEARN[:2], "--target=v5p,v5e", *flags)
    assert status == 0, err
    assert text.startswith("infinity-2b, learning step of 64 images, bfloat16, mesh data=8")
    rows = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    assert (
        rows["fits"] == ["yes", "NO:", "asks", "for", "16", "GiB"] and rows["parameters"][0] == "1"
    )
    assert rows["temporaries"] == ["1", "GiB"] and rows["floor, seconds"][0] == "0.01"
    assert "2 x      4 KiB,    3.5 KiB sent  all-gather of 8: jvp()/dot_general" in text
    assert "70 x  jvp()/tanh" in text and "of 8 GiB (too large)" in text
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["title"].startswith("infinity-2b") and len(content["results"]) == 2


def step_of(model):
    given = {"mesh": TrainingMesh(), "batch_size": 2, "dtype": "float32"}
    return LearningStep(model=model, sampling=model.sampling(), **given)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["b_k6_sharedaln", "llamagen_c2i"])
def test_a_learning_step_takes_what_a_run_gives_it(call, case, monkeypatch, tmp_path):
    folder, taken = models.checkpoint_folder(case), []

    def ends(*given):
        taken.extend(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Programs, "effects", ends)
    if not describe(folder).draws_tokens:  # measured once for several tests
        measured = model_and_measurements(case)[1]
        monkeypatch.setattr("experiments.learn.beginning", lambda *_: measured)
    flags = ("--num_samples=2", "--budgets=0.4", "--batch_size=2", f"--out={tmp_path / 'a.npz'}")
    call("learn", f"--checkpoint={folder}", *flags)
    programs, arguments = step_of(describe(folder)).arguments()
    found, expected = (
        [(a.shape, a.dtype) for a in jax.tree.leaves(t)] for t in (arguments, taken[1:])
    )
    assert programs == taken[0] and found == expected


def test_a_learning_step_of_texts(monkeypatch):
    """It is compiled."""
    monkeypatch.setattr(chips, "compile_only_devices", lambda name, count: jax.devices()[:count])
    step = step_of(models.fixture_model(models.FAMILIES["infinity"]))
    found = learning.describe(step, chips.CHIPS["h100"])
    assert found["fits"] and found["flops"] > 0
    assert found["peak_bytes"] > found["parameter_bytes"]
