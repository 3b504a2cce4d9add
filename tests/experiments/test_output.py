"""Folders of results and of unfinished runs: nothing foreign is touched, nothing finished lost."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments import batch_files, output
from experiments.output import BatchStore
from tests import unfinished_runs as runs
from varjax.core.errors import UserError


def same(found, expected):
    for name, arrays in expected.items():
        assert found[name].keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(found[name][key], array)


# --- whose folder it is ---


def add_file(work):
    (work / "thesis.txt").write_text("precious")


def add_folder(work):
    (work / "main-00000004.npz").mkdir()
    (work / "main-00000004.npz" / "thesis.txt").write_text("precious")


def add_link(work):
    (work.parent / "precious").write_text("precious")
    (work / "lock").unlink(missing_ok=True)
    (work / "lock").symlink_to(work.parent / "precious")


def become_link(work):
    work.rename(work.parent / "elsewhere")
    work.symlink_to(work.parent / "elsewhere")


def become_file(work):
    for path in work.iterdir():
        path.unlink()
    work.rmdir()
    work.write_text("precious")


FOREIGN = {
    add_file: "thesis.txt",
    add_folder: "main-00000004.npz",
    add_link: "lock",
    become_link: "is a link or no folder",
    become_file: "is a link or no folder",
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("disturb", FOREIGN)
def test_what_no_run_wrote_is_left_alone(tmp_path, disturb, overwrite):
    out = tmp_path / "out"
    (tmp_path / "out.partial").mkdir()
    for name in ("main-00000000.npz", "main-00000002.npz"):
        (tmp_path / "out.partial" / name).write_bytes(b"")
    disturb(tmp_path / "out.partial")
    before = runs.tree(tmp_path)
    with pytest.raises(UserError, match=f"out.partial .*{FOREIGN[disturb]}"):
        with BatchStore(out, {"seed": 1}, overwrite=overwrite).working():
            pass
    assert runs.tree(tmp_path) == before


def test_links_put_there_later_are_not_followed(tmp_path):
    """Looked at again when the folder is taken."""
    late = runs.store(tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "settings.json").write_text("precious")
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"), late.working():
        pass
    assert (tmp_path / "elsewhere" / "settings.json").read_text() == "precious"


# --- lost settings ---

LOST = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5]),
    "bytes": lambda path: path.write_bytes(b"\xff\x00"),
    "other": lambda path: path.write_text('{"seed": 10}'),
    "list": lambda path: path.write_text("[]"),
}


@pytest.mark.parametrize("damage", LOST)
def test_lost_settings_are_restored_from_the_batches(tmp_path, damage):
    out = tmp_path / "out"
    work = runs.interrupted(out, 4)
    LOST[damage](work / "settings.json")
    before = runs.tree(tmp_path)
    with pytest.raises(UserError, match="other settings"):
        runs.store(out, {"seed": 1})
    assert runs.tree(tmp_path) == before
    again = runs.store(out)
    with again.working():
        assert again.resumed and [list(index) for index in again.missing("full")] == [[2, 3], [4]]
        assert json.loads((work / "settings.json").read_text()) == runs.SETTINGS
    same(runs.finish(runs.store(out))[1], runs.expected())


def test_a_batch_under_another_name_is_drawn_again(tmp_path, monkeypatch):
    """The copy has the same run, images, types and shapes; only its name is wrong."""
    monkeypatch.setitem(runs.ARRAYS, "main", runs.ARRAYS["full"])
    work, index = runs.interrupted(tmp_path / "out"), np.arange(4, 5)
    other = {name: array + 1 for name, array in runs.batch("full", index).items()}
    digest = runs.store(tmp_path / "out").work.digest
    batch_files.write_batch(work / "full-00000004.npz", digest, {"index": index, **other})
    shutil.copy(work / "full-00000004.npz", work / "main-00000004.npz")
    drawn, found = runs.finish(runs.store(tmp_path / "out"))
    assert drawn == [("main", 4)]
    same(found, runs.expected() | {"full": found["full"]})


# --- damaged batches ---


@pytest.mark.parametrize("damage", ["empty", "cut", "middle", "text", "npy", "other numbers"])
def test_damaged_batches_are_drawn_again(tmp_path, damage):
    """Found when the run starts; all others are kept."""
    out = tmp_path / "out"
    path = runs.interrupted(out) / "full-00000002.npz"
    data = bytearray(path.read_bytes())
    if damage == "other numbers":
        settings, arrays = batch_files.settings_of(path), batch_files.read_batch(path)
        batch_files.write_batch(path, settings, arrays | {"index": arrays["index"] + 1})
    elif damage == "npy":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    else:
        data[len(data) // 4] ^= 1
        path.write_bytes({"empty": b"", "cut": data[:300], "text": b"text"}.get(damage, data))
    drawn, found = runs.finish(runs.store(out))
    assert drawn == [("full", 2)]
    same(found, runs.expected())


def test_batches_damaged_during_the_run_are_named(tmp_path):
    out = tmp_path / "out"
    disturbed = runs.store(out)
    with disturbed.working():
        runs.draw(disturbed)
        (disturbed.work.path / "main-00000002.npz").write_bytes(b"")
        with pytest.raises(UserError, match=r"main-00000002.npz is damaged .*again"):
            list(disturbed.batches("main"))
    assert runs.finish(runs.store(out))[0] == [("main", 2)]


def test_what_a_killed_run_left_is_tidied(tmp_path):
    work = runs.interrupted(tmp_path / "out", 1)
    for name in (".main-00000002.npz.123", "pixels.npy", ".settings.json.99"):
        (work / name).write_bytes(b"half")
    with runs.store(tmp_path / "out").working():
        assert {path.name for path in work.iterdir()} == {
            "lock",
            "settings.json",
            "main-00000000.npz",
        }


# --- full disks ---


@pytest.mark.parametrize("where", ["replace", "rename"])
def test_nothing_finished_is_lost_where_a_disk_is_full(tmp_path, monkeypatch, where):
    """In the middle of a batch, or of the results."""
    out = tmp_path / "out"
    runs.interrupted(out, 5)

    def full(*names):
        raise OSError(errno.ENOSPC, "No space left on device", names[0])

    monkeypatch.setattr(os, where, full)
    with pytest.raises(OSError, match="No space left"):
        runs.finish(runs.store(out))
    monkeypatch.undo()
    assert not out.exists() and (tmp_path / "out.partial").is_dir()
    drawn, found = runs.finish(runs.store(out))
    assert drawn == ([("full", 4)] if where == "replace" else [])
    same(found, runs.expected())


# --- where ---


@pytest.mark.parametrize("out", [".", "..", "../here", "x/y", "x/.."])
def test_the_work_folder_is_beside_the_results(out):
    work = output.partial_folder(Path(out))
    assert os.path.abspath(work) == os.path.abspath(out) + ".partial"


def test_the_default_folder_stays_in_results(tmp_path, monkeypatch):
    """However a policy or a model is called."""
    monkeypatch.chdir(tmp_path)
    assert BatchStore.fresh("demo-full", {}).out == output.RESULTS / "demo-full-001"
    for stem in ("../../x", "a/../../x", "/x", "..", "a\0b", "x" * 300, "\udcff"):
        with pytest.raises(UserError, match="the default folder: .*cannot be the name"):
            BatchStore.fresh(stem, {})
    assert not list(tmp_path.iterdir())
