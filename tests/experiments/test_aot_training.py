"""`experiments.aot --train` and `--learn`: wrong flags, the table, steps that are compiled."""

import json
import os
import subprocess
import sys

import jax
import pytest

from experiments.aot import training, worker
from experiments.aot.training import LearningStep
from experiments.training.learner import Programs
from experiments.training.mesh import TrainingMesh
from pallas_kernels import chips
from tests import models_under_test as models
from tests.policies.test_every_policy import model_and_measurements
from varjax.models.loading import describe

TRAIN = ("--model=var-d36", "--train", "--target=v5p")
LEARN = ("--model=infinity-2b", "--learn", "--target=h100")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model=infinity-8b", "--train"), "there is no training of infinity models"),
        (("--model=llamagen-t2i-xl-256", "--train"), "training is for models of classes"),
        ((*TRAIN, "--policy=h2o"), "--policy decides how pictures are drawn"),
        ((*TRAIN, "--largest_batch"), "--largest_batch decides how pictures are drawn"),
        ((*TRAIN, "--mesh=fsdp=8", "--batch_size=12"), "choose a multiple of 8"),
        ((*TRAIN, "--mesh=fsdp=4", "--batch_size=8", "--accumulate=4"), "a multiple of 16"),
        ((*TRAIN, "--mesh=model=4"), "unknown axis 'model' of a mesh"),
        ((*TRAIN, "--mesh=fsdp=4096", "--batch_size=4096"), "takes 4096 devices"),
        ((*LEARN, "--policy=h2o"), "--policy decides how pictures are drawn, and --learn compiles"),
        ((*LEARN, "--mesh=data=8", "--batch_size=11"), "choose a multiple of 8"),
        ((*LEARN, "--remat"), "--remat is of training steps"),
        ((*LEARN, "--train"), "--train and --learn compile different steps"),
        (("--model=var-d36", "--remat"), "--remat is of training steps: add --train"),
        (("--model=var-d36", "--accumulate=2"), "--accumulate is of training steps"),
    ],
)
def test_bad_input(refused, compilers, flags, message):
    refused("aot", message, *flags)


def test_table(call, compilers, monkeypatch, tmp_path):
    gathered = {"kind": "all-gather", "source": "jvp()/dot_general", "group": 8, "calls": 2.0}
    gathered |= {"bytes": 4096.0, "sent_bytes": 3584.0}
    compiled = {"status": "compiled", "batch_size": 64, "devices": 8, "state_bytes": 2**30}
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
    flags = ("--mesh=fsdp=8", "--batch_size=64", f"--json={tmp_path / 'a.json'}", "--verbose")
    status, text, err = call("aot", *TRAIN[:2], "--target=v5p,v5e", *flags)
    assert status == 0, err
    assert text.startswith("var-d36, training step of 64 images, bfloat16, mesh data=1,fsdp=8")
    rows = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    assert rows["fits"] == ["yes", "NO:", "asks", "for", "16", "GiB"] and rows["state"][0] == "1"
    assert rows["temporaries"] == ["1", "GiB"] and rows["floor, seconds"][0] == "0.01"
    assert "2 x      4 KiB,    3.5 KiB sent  all-gather of 8: jvp()/dot_general" in text
    assert "70 x  jvp()/tanh" in text and "of 8 GiB (too large)" in text
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["title"].startswith("var-d36") and len(content["results"]) == 2


STEP = """
import json, jax
from experiments.aot import training
from experiments.aot.training import TrainingStep
from pallas_kernels import chips
from tests import models_under_test as models
from experiments.training.mesh import TrainingMesh
chips.compile_only_devices = lambda name, count: jax.devices()[:count]
model = models.fixture_model("b_k6_sharedaln")
step = TrainingStep(model=model, mesh=TrainingMesh(2, 4), batch_size=16, dtype="float32",
                    accumulate=2, remat=True)
step.check()
found = training.describe(step, chips.CHIPS["tpu-v5e"])
one = TrainingStep(model=model, mesh=TrainingMesh(1, 1), batch_size=16, dtype="float32",
                   accumulate=2, remat=True)
alone = training.describe(one, chips.CHIPS["tpu-v5e"])
rows, none = (f["programs"]["a step"]["collectives"] for f in (found, alone))
kinds = sorted({(row["kind"], row["group"]) for row in rows})
sums = {}
for row in rows:
    sums[row["kind"]] = sums.get(row["kind"], 0) + row["bytes"]
names = ("state_bytes", "parameters", "flops", "peak_bytes", "aliased")
print(json.dumps([kinds, *({n: f[n] for n in names} for f in (found, alone)),
                  none, sums]))
"""


@pytest.mark.slow
def test_a_step_over_fake_devices():
    """The step that experiments.train runs, compiled for CPUs: a device has a quarter of the state
    and an eighth of the products, and exchanges parameters and gradients, no activations."""
    found = subprocess.run(
        [sys.executable, "-c", STEP],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    kinds, divided, alone, exchanged, sums = json.loads(found.stdout)
    assert not exchanged and any(kind == ["all-gather", 4] for kind in kinds), kinds
    # each of two parts gathers a layer for its pictures and again for gradients, and sums
    # gradients; by itself the compiler gathers over 20 times the parameters
    size = 4 * divided["parameters"]
    assert size <= sums.pop("all-gather") <= 4 * size and sum(sums.values()) < 3 * size, sums
    assert divided["flops"] == pytest.approx(alone["flops"] / 8)
    assert 4 * divided["parameters"] * 4 <= alone["state_bytes"]  # with average and two moments
    assert 0.25 <= divided["state_bytes"] / alone["state_bytes"] < 0.26
    assert divided["aliased"] and alone["aliased"]


def learning(model):
    given = {"mesh": TrainingMesh(), "batch_size": 2, "dtype": "float32"}
    return LearningStep(model=model, sampling=model.sampling(), **given)


@pytest.mark.parametrize(
    "case", ["b_k6_sharedaln", pytest.param("llamagen_c2i", marks=pytest.mark.slow)]
)
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
    programs, arguments = learning(describe(folder)).arguments()
    found, expected = (
        [(a.shape, a.dtype) for a in jax.tree.leaves(t)] for t in (arguments, taken[1:])
    )
    assert programs == taken[0] and found == expected


def test_a_learning_step_of_texts(monkeypatch):
    """It is compiled, and changes its state in place."""
    monkeypatch.setattr(chips, "compile_only_devices", lambda name, count: jax.devices()[:count])
    step = learning(models.fixture_model(models.FAMILIES["infinity"]))
    found = training.describe(step, chips.CHIPS["h100"])
    assert found["aliased"] and found["fits"] and found["flops"] > 0
    assert found["peak_bytes"] > found["parameter_bytes"] + found["state_bytes"]
