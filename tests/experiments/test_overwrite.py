"""What --overwrite replaces: folders in which every file is one that was written, and no others."""

import json

import numpy as np
import pytest

from experiments import output
from experiments.prompts import layouts
from experiments.prompts.sets import Prompt, PromptFormat, PromptSet
from tests import unfinished_runs as runs
from varjax.core.errors import UserError
from varjax.generation.api import Generator
from varjax.storage import checkpoint
from varjax.storage.atomic import check_new_folder, new_folder


def report(folder, name="report.json", **more):
    content = dict.fromkeys(("policy", "kv", "settings", "cells", "versions"), {})
    (folder / name).write_text(json.dumps(content | more))


def a_run(folder):
    report(folder, files=["report.json", "grid.png"])
    (folder / "grid.png").write_bytes(b"")


def a_run_of_prompts(folder):
    prompts = PromptSet((Prompt("a dog", "00000", "line 1"),), PromptFormat.GENEVAL, 1)
    layouts.write_images(folder, prompts, np.zeros((1, 8, 8, 3), np.uint8), 1, seed=0)
    report(folder, files=["report.json", "manifest.json"])


def a_run_and_an_image(folder):
    a_run_of_prompts(folder)
    (folder / "images" / "00000" / "holiday.png").write_bytes(b"precious")


def a_run_and_a_calibration(folder):
    """A name that `sweep` writes."""
    a_run(folder)
    (folder / "calibration.json").write_text("precious")


def a_run_and_arrays(folder):
    """Which this run did not write."""
    report(folder, files=["report.json"])
    (folder / "arrays.npz").write_bytes(b"precious")


def linked_images(folder):
    a_run_of_prompts(folder)
    (folder / "images").rename(folder.parent / "elsewhere")
    (folder / "images").symlink_to("../elsewhere")


def a_linked_grid(folder):
    report(folder)
    (folder / "grid.png").symlink_to("../elsewhere.png")


def images_without_a_manifest(folder):
    a_run_of_prompts(folder)
    (folder / "manifest.json").unlink()


def a_list_of_anything(folder):
    somebodys(folder)
    report(folder, files=["report.json", "thesis.txt"])


def a_sweep(folder):
    report(folder, "sweep.json", files=["sweep.json", "samples.npz"])
    (folder / "samples.npz").write_bytes(b"")
    (folder / ".DS_Store").write_bytes(b"")


def nothing(folder):
    pass


def somebodys(folder):
    (folder / "thesis.txt").write_text("precious")


def somebodys_report(folder):
    (folder / "report.json").write_text('{"profit": 3}')


def damaged_report(folder):
    (folder / "report.json").write_text('{"policy": "x", "kv"')


def a_run_and_notes(folder):
    a_run(folder)
    somebodys(folder)


DESCRIBED = {"format_version": 1, "dtype": "float32", "parameters": 1}
RECORD = {"size": 0, "crc32": "00000000"}


def a_checkpoint(folder):
    content = DESCRIBED | {"family": "var", "files": {"d/x": RECORD}}
    (folder / "model.json").write_text(json.dumps(content))
    (folder / "params" / "d").mkdir(parents=True)
    (folder / "params" / "d" / "x").write_bytes(b"")


def a_checkpoint_and_calibration(folder):
    a_checkpoint(folder)
    (folder / "calibration.json").write_text("{}")


def a_checkpoint_and_an_encoder(folder):
    """Which a user copied in: `model.json` does not name it."""
    a_checkpoint(folder)
    (folder / "text_encoder").mkdir()
    an_encoder(folder / "text_encoder")


def a_checkpoint_and_more_parameters(folder):
    a_checkpoint(folder)
    (folder / "params" / "d" / "mine").write_bytes(b"precious")


def a_linked_checkpoint(folder):
    a_checkpoint(folder)
    (folder / "params" / "d" / "x").unlink()
    (folder / "params" / "d" / "x").symlink_to("../../model.json")


def an_encoder(folder):
    content = DESCRIBED | {"kind": "t5", "files": {"params/x": RECORD, "spiece.model": RECORD}}
    (folder / "text_encoder.json").write_text(json.dumps(content))
    (folder / "params").mkdir()
    (folder / "params" / "x").write_bytes(b"")
    (folder / "spiece.model").write_bytes(b"")


REPLACED = [(output.written, fill) for fill in (a_run, a_run_of_prompts, a_sweep, nothing)]
REPLACED += [(checkpoint.written, fill) for fill in (a_checkpoint, an_encoder, nothing)]
KEPT = [(output.written, fill) for fill in (somebodys, somebodys_report, damaged_report)]
KEPT += [(output.written, fill) for fill in (a_run_and_notes, a_checkpoint)]
KEPT += [(checkpoint.written, f) for f in (somebodys, a_run, a_checkpoint_and_calibration)]
KEPT += [
    (checkpoint.written, a_checkpoint_and_an_encoder),
    (checkpoint.written, a_linked_checkpoint),
]
KEPT += [(output.written, fill) for fill in (a_run_and_an_image, a_run_and_a_calibration)]
KEPT += [(output.written, fill) for fill in (a_run_and_arrays, linked_images, a_linked_grid)]
KEPT += [(output.written, fill) for fill in (images_without_a_manifest, a_list_of_anything)]
KEPT += [(checkpoint.written, a_checkpoint_and_more_parameters)]


@pytest.mark.parametrize(("replaces", "fill"), REPLACED)
def test_own_folders_are_replaced(tmp_path, replaces, fill):
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        check_new_folder(tmp_path / "out")
    with new_folder(tmp_path / "out", replaces=replaces) as folder:
        (folder / "new").write_text("new")
    assert runs.tree(tmp_path / "out") == {"new": b"new"}


@pytest.mark.parametrize(("replaces", "fill"), KEPT)
def test_no_other_folder_is_replaced(tmp_path, replaces, fill):
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out")
    before = runs.tree(tmp_path)
    with pytest.raises(UserError, match="out holds .* not replaced.*choose another"):
        with new_folder(tmp_path / "out", replaces=replaces) as folder:
            (folder / "new").write_text("new")
    assert runs.tree(tmp_path) == before


def test_what_comes_later_is_not_replaced_either(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="thesis.txt"):
        with new_folder(tmp_path / "out", replaces=output.written):
            somebodys(tmp_path / "out")
    assert runs.tree(tmp_path) == {"out": "folder", "out/thesis.txt": b"precious"}


def test_commands_check_before_they_work(tmp_path, call, monkeypatch):
    monkeypatch.setattr(Generator, "compile", lambda *a, **k: pytest.fail("compiled"))
    monkeypatch.chdir(tmp_path)
    somebodys(tmp_path)
    before = runs.tree(tmp_path)
    for command, out in (("run", "."), ("run", "/"), ("sweep", f"../{tmp_path.name}")):
        status, _, err = call(command, "--num_images=1", f"--out={out}", "--overwrite")
        assert status == 2 and "holds '" in err and "is not replaced: " in err, err
    assert runs.tree(tmp_path) == before
