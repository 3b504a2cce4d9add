"""Several processes on the loopback address: one result, nothing lost or repeated, and errors that
all of them say."""

import json

import numpy as np
import pytest

from tests import models_under_test as models
from tests.experiments.together import loaded, start, stored

RUN = ("--policy=swa", "--budget=0.5", "--segments=1", "--num_images=8")


def test_killed_then_resumed_with_another_number_is_one_run(checkpoint, tmp_path):
    """Two processes, one of which dies; three, which are asked to end; then one without them."""
    flags = (checkpoint, *RUN, "--save_arrays")
    two = start(
        tmp_path, "run", [{}, {"when": "SIGKILL:1"}], *flags, "--batch_size=2", "--mesh=data=-1"
    )
    assert two[1][0] == -9 and two[0][0] != 0, two
    assert "another process is gone" in two[0][2] or "died" in two[0][2], two[0][2]
    before = stored(tmp_path)
    assert before and not (tmp_path / "out").exists()
    three = start(
        tmp_path, "run", [{"when": "SIGTERM:1"}, {}, {}], *flags, "--batch_size=3", "--mesh=data=3"
    )
    assert [status for status, *_ in three] == [0, 0, 0], three
    assert "resume by the same command" in three[0][2] and not (tmp_path / "out").exists()
    four = start(tmp_path, "run", [{}, {}], *flags, "--batch_size=2")
    assert [status for status, *_ in four] == [0, 0], four
    assert "images/s" in four[0][2] and "image 8/8" in four[0][2] and not four[1][1]
    assert stored(tmp_path) == {f"main {i}": 1 for i in range(8)}  # nothing lost or repeated
    whole = tmp_path / "whole"
    # a process of its own, since this one compiles with other flags (`tests.compilation`)
    alone = start(tmp_path, "run", [{}], *flags, "--batch_size=1", out="whole")  # as on each device
    assert alone[0][0] == 0, alone
    for name in ("samples.npz", "arrays.npz"):
        ours, theirs = loaded(tmp_path / "out" / name), loaded(whole / name)
        assert ours.keys() == theirs.keys()
        for key, array in ours.items():
            if array.dtype == np.float32:  # a convolution may add in another order
                np.testing.assert_allclose(array, theirs[key], atol=1e-4, err_msg=key)
            else:  # pictures, labels, tokens
                np.testing.assert_array_equal(array, theirs[key], err_msg=key)
    grids = [(folder / "grid.png").read_bytes() for folder in (tmp_path / "out", whole)]
    assert grids[0] == grids[1]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ([1], [0, 1]))
def test_asked_to_end_in_the_last_batch(asked, checkpoint, tmp_path):
    """While others may have drawn their share and wait: all end together."""
    own = [{"when": "SIGTERM:4"} if i in asked else {} for i in range(2)]
    two = start(tmp_path, "run", own, checkpoint, *RUN, "--batch_size=2")
    assert [status for status, *_ in two] == [0, 0], two
    said = f"{len(stored(tmp_path))} of 8 images are stored: resume by the same command"
    assert said in two[0][2] and len(stored(tmp_path)) >= 4
    assert not (tmp_path / "out").exists()
    again = start(tmp_path, "run", [{}, {}], checkpoint, *RUN, "--batch_size=2")
    assert [status for status, *_ in again] == [0, 0], again
    assert (tmp_path / "out" / "report.json").exists()
    assert stored(tmp_path) == {f"main {i}": 1 for i in range(8)}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        pytest.param(
            {"flags": ["--seed=1"]},
            "process 1 was started with another seed than process 0",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"flags": ["--budget=0.6"]},
            "process 1 was started with another",
            marks=pytest.mark.slow,
        ),
        pytest.param({"flags": ["--budget=7"]}, "budget", marks=pytest.mark.slow),
        pytest.param(
            {"flags": ["--mesh=data=99"]},
            "a mesh of data=99,model=1 takes 99 devices",
            marks=pytest.mark.slow,
        ),
        ({"out": "elsewhere/out"}, "not the same folder as that of process 0"),
    ],
)
def test_what_one_process_is_asked_for_all_must_be(checkpoint, tmp_path, own, message):
    (tmp_path / "elsewhere").mkdir()
    found = start(tmp_path, "run", [{}, own], checkpoint, *RUN)
    for status, _, err in found:
        assert status == 2 and message in err and err.count("error:") == 1, found
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("notes")}
    assert left <= {"elsewhere", "programs"} and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
def test_other_checkpoints(checkpoint, tmp_path):
    own = {"flags": [f"--checkpoint={models.checkpoint_folder('a_k10')}"]}
    for status, _, err in start(tmp_path, "run", [{}, own], checkpoint, *RUN):
        assert status == 2 and "process 1 was started with another checkpoint" in err, err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.slow
def test_two_jobs_on_one_folder(checkpoint, tmp_path):
    from varjax.storage import lock

    with lock.held(tmp_path / "out.partial", "busy"):
        found = start(tmp_path, "run", [{}, {}], checkpoint, *RUN)
    for status, _, err in found:
        assert status == 2 and "another run is writing" in err, found


@pytest.mark.slow
def test_model_over_processes(call, checkpoint, tmp_path):
    flags = (checkpoint, "--num_images=4", "--batch_size=4", "--segments=1")
    found = start(tmp_path, "run", [{}] * 4, *flags, "--mesh=data=-1,model=2")
    assert [status for status, *_ in found] == [0] * 4, found
    whole = tmp_path / "whole"
    assert call("run", *flags, f"--out={whole}")[0] == 0
    ours, theirs = (loaded(f / "samples.npz") for f in (tmp_path / "out", whole))
    np.testing.assert_allclose(ours["arr_0"].astype(int), theirs["arr_0"], atol=1)
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["mesh"] == "data=2,model=2"
