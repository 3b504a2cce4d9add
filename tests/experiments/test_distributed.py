"""Several processes on the loopback address: one result, nothing lost or repeated, and errors that
all of them say. SIGTERM ends one process after what it draws."""

import json
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.batch_files import Series
from experiments.evaluate import sets as evaluated
from experiments.evaluation.statistics import Moments
from experiments.output import BatchStore
from tests.experiments.together import loaded, start, stored

RUN = ("--policy=swa", "--budget=0.5", "--segments=1", "--num_images=8")
EVALUATE = ("--features=demo",)
SWEEP = ("--policies=swa,streaming:sinks=1", "--budgets=0.4,0.6", "--num_images=4", "--samples=2")
SWEEP += ("--segments=1",)
COUNTS = {"samples": 14, "full": 14, "reference": 10}  # pictures


def content(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def sets(tmp_path):
    """Flags of three sets of pictures: noise, of which two are nearly the same."""
    rng, flags = np.random.default_rng(0), []
    noise = rng.integers(0, 240, (14, 64, 64, 3), np.uint8)
    for i, (name, count) in enumerate(COUNTS.items()):
        images = noise[:count] + rng.integers(0, 8, (count, 64, 64, 3), np.uint8)
        np.savez(tmp_path / f"{name}.npz", arr_0=images, arr_1=np.arange(count) + i)
        flags.append(f"--{name}={tmp_path / name}.npz")
    return flags


@pytest.mark.slow
def test_killed_then_resumed_with_another_number_is_one_run(checkpoint, tmp_path):
    """Two processes, one of which dies; three, which are asked to end; then two again. One process
    that draws as each device does writes the same."""
    flags = (checkpoint, *RUN, "--save_arrays")
    two = start(tmp_path, "run", [{}, {"when": "SIGKILL:1"}], *flags, "--batch_size=2")
    assert [status for status, *_ in two] == [1, -9], two
    assert "another process is gone" in two[0][2] and "Traceback" not in two[0][2], two[0][2]
    before = stored(tmp_path)
    assert before and not (tmp_path / "out").exists()
    own = [{"when": "SIGTERM:1"}, {}, {}]
    three = start(tmp_path, "run", own, *flags, "--batch_size=3", "--mesh=data=3")
    assert [status for status, *_ in three] == [0, 0, 0], three
    if not (tmp_path / "out").exists():  # else all were drawn before JAX heard of it
        assert "images are stored: resume by the same command" in three[0][2], three
        again = start(tmp_path, "run", [{}, {}], *flags, "--batch_size=2")
        assert [status for status, *_ in again] == [0, 0], again
        assert "image 8/8" in again[0][2] and not again[1][1]
    assert stored(tmp_path) == {f"main {i}": 1 for i in range(8)}  # nothing lost or repeated
    # a process of its own, since this one compiles with other flags (`tests.compilation`)
    alone = start(tmp_path, "run", [{}], *flags, "--batch_size=1", out="whole")
    assert alone[0][0] == 0, alone
    for name in ("samples.npz", "arrays.npz"):
        ours, theirs = (loaded(tmp_path / out / name) for out in ("out", "whole"))
        assert ours.keys() == theirs.keys()
        for key, array in ours.items():
            if array.dtype == np.float32:  # a convolution may add in another order
                np.testing.assert_allclose(array, theirs[key], atol=1e-4, err_msg=key)
            else:  # pictures, labels, tokens
                np.testing.assert_array_equal(array, theirs[key], err_msg=key)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"flags": ["--seed=1"]}, "process 1 was started with another seed than process 0"),
        pytest.param({"flags": ["--budget=7"]}, "budget", marks=pytest.mark.slow),
        pytest.param(
            {"flags": ["--mesh=data=99"]},
            "a mesh of data=99,model=1 takes 99 devices",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_one_process_is_asked_for_all_must_be(checkpoint, tmp_path, own, message):
    found = start(tmp_path, "run", [{}, own], checkpoint, *RUN)
    for status, _, err in found:
        assert status == 2 and message in err and err.count("error:") == 1, found
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.slow
def test_model_over_processes(call, checkpoint, tmp_path):
    flags = (checkpoint, "--num_images=4", "--batch_size=4", "--segments=1")
    found = start(tmp_path, "run", [{}] * 4, *flags, "--mesh=data=-1,model=2")
    assert [status for status, *_ in found] == [0] * 4, found
    whole = tmp_path / "whole"
    assert call("run", *flags, f"--out={whole}")[0] == 0
    ours, theirs = (loaded(f / "samples.npz") for f in (tmp_path / "out", whole))
    np.testing.assert_allclose(ours["arr_0"].astype(int), theirs["arr_0"], atol=1)
    assert content(tmp_path / "out" / "report.json")["mesh"] == "data=2,model=2"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["evaluate", "sweep"])
def test_figures_of_many_that_were_killed_and_asked_to_end(verb, checkpoint, sets, tmp_path):
    """They are those of one process that computes as each device does."""
    flags = (*sets, *EVALUATE) if verb == "evaluate" else (checkpoint, *SWEEP)
    flags, many = (*flags, "--batch_size=1"), "--batch_size=2"
    for when, statuses in (("SIGKILL:3", [1, -9]), ("SIGTERM:2", [0, 0]), ("0", [0, 0])):
        if not (tmp_path / "out").exists():  # else all were done before JAX heard of SIGTERM
            found = start(tmp_path, verb, [{}, {"when": when}], *flags, many)
            assert [status for status, *_ in found] == statuses, found
    assert (tmp_path / "out").exists() and set(stored(tmp_path).values()) == {1}
    alone = start(tmp_path, verb, [{}], *flags, out="whole")
    assert alone[0][0] == 0, alone
    (check_figures if verb == "evaluate" else check_sweep)(tmp_path)


def check_figures(folder):
    """Every bit of the evaluations `out` and `whole`, but for how they were divided."""
    a, b = (content(folder / out / "metrics.json") for out in ("out", "whole"))
    recipes = [found.pop("recipe") for found in (a, b)]
    assert a == b and {"demo_frechet", "class_agreement", "psnr", "ssim"} <= a.keys()
    divided = ("batch_size", "mesh", "device")
    assert [{n: v for n, v in r.items() if n not in divided} for r in recipes[:1]] == [
        {n: v for n, v in r.items() if n not in divided} for r in recipes[1:]
    ]


def check_sweep(folder):
    """The fidelity and the pictures of the sweeps `out` and `whole`."""
    a, b = (content(folder / out / "sweep.json")["cells"] for out in ("out", "whole"))
    for one, other in zip(a, b, strict=True):  # programs of other batches add in another order
        assert one["fidelity"] == pytest.approx(other["fidelity"], rel=1e-2, abs=1e-3)
    ours, theirs = (loaded(folder / out / "samples.npz") for out in ("out", "whole"))
    for name, array in ours.items():
        tolerance = 1e-4 if array.dtype.kind == "f" else 0
        np.testing.assert_allclose(array, theirs[name], rtol=tolerance, err_msg=name)


def ended_after(monkeypatch, owner, name):
    """Let a method of a class be followed by SIGTERM, once."""
    method, asked = getattr(owner, name), []

    def followed(self, *args):
        method(self, *args)
        if not asked:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(owner, name, followed)


def test_sigterm_ends_an_evaluation_after_a_part(call, sets, tmp_path, monkeypatch):
    """Schedulers send it before they take a machine away."""
    monkeypatch.setattr(evaluated, "LEAST_CHUNK", 4)
    flags = (sets[0], sets[2], *EVALUATE, "--batch_size=2")
    before = signal.getsignal(signal.SIGTERM)
    ended_after(monkeypatch, BatchStore, "add")
    status, text, err = call("evaluate", *flags, f"--out={tmp_path / 'out'}")
    assert status == 0 and "4 of 24 pictures are stored: resume by the same command" in err
    assert not text and not (tmp_path / "out").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    for out in ("out", "whole"):
        assert call("evaluate", *flags, f"--out={tmp_path / out}")[0] == 0
    ours, theirs = (content(tmp_path / out / "metrics.json") for out in ("out", "whole"))
    assert ours == theirs


@pytest.mark.parametrize("sizes", [(5000,), (1, 2047, 2048, 904)])
def test_sums_do_not_depend_on_files(sizes, monkeypatch):
    """Features come in files whose sizes differ with the size of batches."""
    rows, found = np.arange(5000.0)[:, None], []
    files = np.split(rows, np.cumsum(sizes)[:-1])
    add = Moments.add
    monkeypatch.setattr(Moments, "add", lambda self, x: (found.append(x), add(self, x)))
    store = SimpleNamespace(
        series={"samples": Series(5000, 1)},
        batches=lambda name: ((None, {"pool": file}) for file in files),
    )
    network = SimpleNamespace(widths={"pool": 1})
    job = SimpleNamespace(sides={"samples": SimpleNamespace(statistics=None)}, network=network)
    assert evaluated.gaussian(job, store, "samples", "pool").mean == pytest.approx(rows.mean())
    assert list(map(len, found)) == [2048, 2048, 904]
    np.testing.assert_array_equal(np.concatenate(found), rows)
