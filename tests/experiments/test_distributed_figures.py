"""Evaluations and sweeps of several processes: the figures of one, whatever ends on the way."""

import json
import os
import signal

import numpy as np
import pytest

from experiments.evaluate import features
from experiments.output import BatchStore
from experiments.sweep.cells import Runner
from tests.experiments.test_shards import _without_times
from tests.experiments.together import loaded, start, stored

EVALUATE = ("--features=demo", "--batch_size=2")
SWEEP = ("--policies=swa,streaming:sinks=1", "--budgets=0.4,0.6", "--num_images=4", "--samples=2")
SWEEP += ("--batch_size=1", "--segments=1")
COUNTS = {"samples": 14, "full": 14, "reference": 10}  # pictures
# of the recipe; the rest says how a computation was divided
SAME = ("protocol", "samples", "reference", "extractor", "full", "ssim", "psnr", "versions")


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


def check_figures(ours, theirs):
    """Every bit of two evaluations, but for how they were divided."""
    a, b = content(ours / "metrics.json"), content(theirs / "metrics.json")
    recipes = [found.pop("recipe") for found in (a, b)]
    assert a == b and {"demo_frechet", "class_agreement", "psnr", "ssim"} <= a.keys()
    assert [recipes[0].get(n) for n in SAME] == [recipes[1].get(n) for n in SAME]
    each = [loaded(folder / "per_image.npz") for folder in (ours, theirs)]
    assert each[0].keys() == each[1].keys()
    for name, array in each[0].items():
        np.testing.assert_array_equal(array, each[1][name], err_msg=name)


@pytest.mark.slow
def test_an_evaluation_killed_then_resumed_with_other_numbers(call, sets, tmp_path):
    """Two processes, one of which is killed; three, one of which is asked to end; then four."""
    flags = (*sets, *EVALUATE)
    two = start(tmp_path, "evaluate", [{}, {"when": "SIGKILL:3"}], *flags)
    assert two[1][0] == -9 and two[0][0] != 0, two
    three = start(tmp_path, "evaluate", [{}, {"when": "SIGTERM:2"}, {}], *flags)
    assert [status for status, *_ in three] == [0, 0, 0], three
    if not (tmp_path / "out").exists():  # else all were stored before it asked
        assert "pictures are stored: resume by the same command" in three[0][2], three
        assert 4 < sum(stored(tmp_path).values()) < 38
        four = start(tmp_path, "evaluate", [{}] * 4, *flags)
        assert [status for status, *_ in four] == [0] * 4, four
        assert "Frechet distance" in four[0][1] and not any(found[1] for found in four[1:]), four
    series = {"samples": 14, "reference": 10, "pairs": 14}
    assert stored(tmp_path) == {f"{n} {i}": 1 for n, count in series.items() for i in range(count)}
    assert call("evaluate", *flags, f"--out={tmp_path / 'whole'}")[0] == 0
    check_figures(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_an_evaluation_of_many(call, sets, tmp_path, count):
    found = start(tmp_path, "evaluate", [{}] * count, *sets, *EVALUATE)
    assert [status for status, *_ in found] == [0] * count, found
    assert call("evaluate", *sets, *EVALUATE, f"--out={tmp_path / 'whole'}")[0] == 0
    check_figures(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
def test_a_sweep_killed_then_resumed_with_other_numbers(checkpoint, tmp_path):
    """Two processes, one of which is killed after its first cell; three, one of which is asked to
    end; then four."""
    flags = (checkpoint, *SWEEP)
    two = start(tmp_path, "sweep", [{}, {"when": "SIGKILL:1"}], *flags)
    assert two[1][0] == -9 and two[0][0] != 0, two
    three = start(tmp_path, "sweep", [{"when": "SIGTERM:1"}, {}, {}], *flags)
    assert [status for status, *_ in three] == [0, 0, 0], three
    if not (tmp_path / "out").exists():  # else all cells were stored before it asked
        assert "cells are stored: resume by the same command" in three[0][2], three
        four = start(tmp_path, "sweep", [{}] * 4, *flags)
        assert [status for status, *_ in four] == [0] * 4, four
        assert four[0][1].count("streaming") == 2 and not any(f[1] for f in four[1:]), four
    cells = [f"{name} {b}" for name in ("swa", "streaming:sinks=1") for b in ("0.4", "0.6")]
    assert stored(tmp_path) == {f"cell {name}": 1 for name in ("full 1", *cells)}
    check_sweep_of_many(flags, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_sweep_of_many(checkpoint, tmp_path, count):
    found = start(tmp_path, "sweep", [{}] * count, checkpoint, *SWEEP)
    assert [status for status, *_ in found] == [0] * count, found
    check_sweep_of_many((checkpoint, *SWEEP), tmp_path)


def check_sweep_of_many(flags, folder):
    """It is one process's, and that is a process of its own, since this one compiles with other
    flags (`tests.compilation`)."""
    alone = start(folder, "sweep", [{}], *flags, out="whole")
    assert alone[0][0] == 0, alone
    check_sweep(folder)


def check_sweep(folder):
    """Every bit of the figures and pictures of `out` is that of `whole`; times are not compared."""
    ours, theirs = (_without_times(content(folder / f / "sweep.json")) for f in ("out", "whole"))
    assert ours == theirs
    ours, theirs = (loaded(folder / f / "samples.npz") for f in ("out", "whole"))
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["evaluate", "sweep"])
@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"flags": ["--batch_size=3"]}, "process 1 was started with another"),
        ({"out": "elsewhere/out"}, "not the same folder as that of process 0"),
    ],
)
def test_what_one_process_is_asked_for_all_must_be(checkpoint, sets, tmp_path, verb, own, message):
    (tmp_path / "elsewhere").mkdir()
    given = (*sets, *EVALUATE) if verb == "evaluate" else (checkpoint, *SWEEP)
    for status, _, err in start(tmp_path, verb, [{}, own], *given):
        assert status == 2 and message in err and err.count("error:") == 1, err
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


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
    monkeypatch.setattr(features, "LEAST_CHUNK", 4)
    flags, before = (sets[0], sets[2], *EVALUATE), signal.getsignal(signal.SIGTERM)
    ended_after(monkeypatch, BatchStore, "add")
    status, text, err = call("evaluate", *flags, f"--out={tmp_path / 'out'}")
    assert status == 0 and "4 of 24 pictures are stored: resume by the same command" in err
    assert not text and not (tmp_path / "out").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    for out in ("out", "whole"):
        assert call("evaluate", *flags, f"--out={tmp_path / out}")[0] == 0
    ours, theirs = (content(tmp_path / out / "metrics.json") for out in ("out", "whole"))
    assert ours == theirs


@pytest.mark.slow
def test_sigterm_ends_a_sweep_after_a_batch(call, checkpoint, tmp_path, monkeypatch):
    """The full cache is stored, and no cell is begun."""
    flags, ran = (checkpoint, *SWEEP), []
    ended_after(monkeypatch, Runner, "keep")
    status, text, err = call("sweep", *flags, f"--out={tmp_path / 'out'}")
    assert status == 0 and "0 of 4 cells are stored: resume by the same command" in err
    assert not text and not (tmp_path / "out").exists()
    keep = Runner.keep
    monkeypatch.setattr(
        Runner, "keep", lambda self, cell, *rest: (ran.append(cell.label), keep(self, cell, *rest))
    )
    assert call("sweep", *flags, f"--out={tmp_path / 'out'}")[0] == 0
    assert sorted(ran) == ["streaming:sinks=1"] * 2 + ["swa"] * 2
    assert call("sweep", *flags, f"--out={tmp_path / 'whole'}")[0] == 0
    check_sweep(tmp_path)


@pytest.mark.parametrize("sizes", [(5000,), (2000, 2000, 1000), (1, 2047, 2048, 904)])
def test_sums_do_not_depend_on_files(sizes):
    """Features come in files whose sizes differ with the number of processes."""
    rows = np.arange(5000.0)[:, None]
    files = np.split(rows, np.cumsum(sizes)[:-1])

    class Store:
        def batches(self, name):
            return ((None, {"pool": file}) for file in files)

    found = list(features._blocks(Store(), "samples", "pool"))
    assert list(map(len, found)) == [2048, 2048, 904]
    np.testing.assert_array_equal(np.concatenate(found), rows)
