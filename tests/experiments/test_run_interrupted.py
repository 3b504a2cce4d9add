"""`experiments.run` interrupted, on a full disk, beside another run: nothing is lost."""

import errno
import os
import shutil
import signal

import numpy as np
import pytest

from experiments.output import BatchStore, written
from experiments.run import files
from tests import models_under_test as models
from tests.experiments.conftest import report_of
from varjax import policies
from varjax.generation.api import Generator
from varjax.storage.atomic import check_new_folder


def test_interrupted_run_resumes_without_repeating(call, checkpoint, tmp_path, monkeypatch):
    """By Ctrl-C in its second batch; by SIGTERM, which schedulers send before they take a machine
    away, after it. Neither devices nor batches decide what is drawn."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    flags = (checkpoint, "--num_images=5", "--batch_size=2", "--save_arrays", "--segments=1")
    start, ran, before = Generator._start, [], signal.getsignal(signal.SIGTERM)

    def counted(self, labels, index, given, **options):
        if len(ran) == 1 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        ran.append(list(index))
        if len(ran) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return start(self, labels, index, given, **options)

    interrupted = []
    monkeypatch.setattr(Generator, "_start", counted)
    into = f"--out={out}"
    status, _, err = call("run", *flags, into)
    assert status == 130 and not out.exists() and (tmp_path / "out.partial").is_dir()

    status, _, err = call("run", *flags, into, "--seed=1")
    assert status == 2 and "other settings" in err and (tmp_path / "out.partial").is_dir()

    status, text, err = call("run", *flags, into)
    assert status == 0 and "2 of 5 images are there already" in err
    assert "4 of 5 images are stored: resume by the same command" in err and not text
    assert not out.exists() and signal.getsignal(signal.SIGTERM) is before

    assert call("run", *flags, "--batch_size=1", into)[0] == 0
    assert ran == [[0, 1], [2, 3], [4]] and report_of(out)["resumed"] is True
    assert call("run", *flags, f"--out={whole}")[0] == 0
    with np.load(out / "arrays.npz") as a, np.load(whole / "arrays.npz") as b:
        for name in a.files:
            np.testing.assert_array_equal(a[name][:4], b[name][:4])
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
    assert not (tmp_path / "out.partial").exists()


def test_a_full_disk_at_the_end_loses_nothing(call, checkpoint, tmp_path, monkeypatch):
    """One line; started again, the same command only writes the results, or draws what is damaged
    by then."""
    out, start, ran = tmp_path / "out", Generator._start, []
    flags = (checkpoint, "--labels=3,7,7", "--batch_size=1", "--compare", "--save_arrays")

    def counted(self, condition, index, given, **options):
        ran.append((self.policy.name, *index))
        return start(self, condition, index, given, **options)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Generator, "_start", counted)
    flags += ("--policy=swa", "--budget=0.5", "--segments=1", f"--out={out}")
    with monkeypatch.context() as patched:
        patched.setattr(files.images, "save_samples_npz", full)
        status, _, err = call("run", *flags)
    assert status == 2 and err.count("error: No space left on device") == 1 and len(ran) == 6
    assert "Traceback" not in err and [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert not (tmp_path / "out.partial" / "pixels.npy").exists()
    (tmp_path / "out.partial" / "main-00000001.npz").write_bytes(b"damaged")
    ran.clear()
    status, _, err = call("run", *flags)
    assert status == 0 and ran == [("swa", 1)], err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    check_new_folder(out, replaces=written)  # with --overwrite


def test_pictures_that_are_none_are_found_at_once(call, checkpoint, tmp_path, monkeypatch):
    """Not when all are drawn."""
    start, ran = Generator._start, []

    def broken(self, *args, **options):
        ran.append(1)
        batch = start(self, *args, **options)
        batch.results["images"] *= np.nan
        return batch

    monkeypatch.setattr(Generator, "_start", broken)
    flags = (checkpoint, "--labels=3,7,1", "--batch_size=1", "--save_arrays", "--segments=1")
    status, _, err = call("run", *flags, f"--out={tmp_path / 'out'}")
    assert status == 2 and "values that are not finite" in err
    assert len(ran) == 2  # the second one while the first was fetched
    assert not list(tmp_path.iterdir())


def test_two_runs_do_not_share_a_folder(call, checkpoint, tmp_path, monkeypatch):
    first = BatchStore(tmp_path / "out", {}, overwrite=False)
    monkeypatch.setattr(Generator, "compile", lambda *a, **k: pytest.fail("compiled"))
    with first.working():
        status, _, err = call("run", checkpoint, f"--out={tmp_path / 'out'}", "--overwrite")
        assert status == 2 and "another run" in err
    assert not list(tmp_path.iterdir())


def test_changed_table_does_not_continue_a_run(tmp_path):
    """The settings of a run hold the content of its table, not only its path."""
    keep = np.zeros((6, 2, 2, 130), bool)
    keep[1:, :, :, 0] = True
    texts = []
    for token in (1, 2):
        keep[2:, :, :, 1:3] = False
        keep[2:, :, :, token] = True
        np.savez(tmp_path / "keep.npz", keep_token=keep)
        texts.append(policies.Table(path=str(tmp_path / "keep.npz")).content())
    assert texts[0] != texts[1]


def test_damaged_checkpoint_leaves_nothing_behind(call, tmp_path, monkeypatch):
    """Neither a work folder nor results/, so that a repaired checkpoint runs."""
    broken = tmp_path / "broken"
    shutil.copytree(models.checkpoint_folder("b_k6_sharedaln"), broken)
    files = (path for path in (broken / "params").rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    monkeypatch.chdir(tmp_path)
    for flags in ((f"--out={tmp_path / 'out'}",), ()):
        status, _, err = call("run", f"--checkpoint={broken}", "--num_images=1", *flags)
        assert status == 2 and largest.name in err
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
