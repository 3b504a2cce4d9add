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


def report(**more):
    return dict.fromkeys(("policy", "kv", "settings", "cells", "versions"), {}) | more


def write_images(folder):
    prompts = PromptSet((Prompt("a dog", "00000", "line 1"),), PromptFormat.GENEVAL, 1)
    layouts.write_images(folder, prompts, np.zeros((1, 8, 8, 3), np.uint8), 1, seed=0)


def link_images(folder):
    (folder / "images").rename(folder.parent / "elsewhere")
    (folder / "images").symlink_to("../elsewhere")


def link(to):
    return lambda path: path.symlink_to(to)


def fill(folder, case):
    """Write a folder of {file: text, JSON data, or a function of its path}, in this order; a name
    that ends in a slash is the folder's own."""
    for name, content in case.items():
        path = folder if name.endswith("/") else folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))


RUN = {"report.json": report(files=["report.json", "grid.png"]), "grid.png": ""}
SWEEP = {"sweep.json": report(files=["sweep.json", "samples.npz"]), "samples.npz": ""}
PROMPTS = {"written/": write_images, "report.json": report(files=["report.json", "manifest.json"])}
SOMEBODYS = {"thesis.txt": "precious"}
DESCRIBED = {"format_version": 1, "dtype": "float32", "parameters": 1}
RECORD = {"size": 0, "crc32": "00000000"}
CHECKPOINT = {
    "model.json": DESCRIBED | {"family": "var", "files": {"d/x": RECORD}},
    "params/d/x": "",
}
ENCODER = {
    "text_encoder.json": DESCRIBED
    | {"kind": "t5", "files": {"params/x": RECORD, "spiece.model": RECORD}},
    "params/x": "",
    "spiece.model": "",
}
REPLACED = {
    "run": (output.written, RUN),
    "run of prompts": (output.written, PROMPTS),
    "sweep": (output.written, SWEEP | {".DS_Store": ""}),
    "nothing for a run": (output.written, {}),
    "checkpoint": (checkpoint.written, CHECKPOINT),
    "encoder": (checkpoint.written, ENCODER),
    "nothing for a checkpoint": (checkpoint.written, {}),
}
OF_RUNS = {
    "somebody's": SOMEBODYS,
    "notes beside it": RUN | SOMEBODYS,
    "a linked grid": {"report.json": report(), "grid.png": link("../elsewhere.png")},
    "a list of anything": {"report.json": report(files=["report.json", "thesis.txt"]), **SOMEBODYS},
    "an image of somebody's": PROMPTS | {"images/00000/holiday.png": "precious"},
    "linked images": PROMPTS | {"linked/": link_images},
    "images without a manifest": PROMPTS | {"manifest.json": lambda path: path.unlink()},
    "a checkpoint": CHECKPOINT,
}
OF_CHECKPOINTS = {
    "somebody's": SOMEBODYS,
    "a run": RUN,
    "a calibration": CHECKPOINT | {"calibration.json": "{}"},
    "an encoder that was copied in": CHECKPOINT
    | {f"text_encoder/{name}": content for name, content in ENCODER.items()},
    "more parameters": CHECKPOINT | {"params/d/mine": "precious"},
    "a link": CHECKPOINT | {"params/d/x": link("../../model.json")},
}
KEPT = [
    pytest.param(of, case, id=f"{name} for {of.__module__}")
    for of, cases in ((output.written, OF_RUNS), (checkpoint.written, OF_CHECKPOINTS))
    for name, case in cases.items()
]


@pytest.mark.parametrize("case", REPLACED)
def test_own_folders_are_replaced(tmp_path, case):
    replaces, content = REPLACED[case]
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", content)
    with pytest.raises(UserError, match="exists already"):
        check_new_folder(tmp_path / "out")
    with new_folder(tmp_path / "out", replaces=replaces) as folder:
        (folder / "new").write_text("new")
    assert runs.tree(tmp_path / "out") == {"new": b"new"}


@pytest.mark.parametrize(("replaces", "content"), KEPT)
def test_no_other_folder_is_replaced(tmp_path, replaces, content):
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", content)
    before = runs.tree(tmp_path)
    with pytest.raises(UserError, match="out holds .* not replaced.*choose another"):
        with new_folder(tmp_path / "out", replaces=replaces) as folder:
            (folder / "new").write_text("new")
    assert runs.tree(tmp_path) == before


def test_what_comes_later_is_not_replaced_either(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="thesis.txt"):
        with new_folder(tmp_path / "out", replaces=output.written):
            fill(tmp_path / "out", SOMEBODYS)
    assert runs.tree(tmp_path) == {"out": "folder", "out/thesis.txt": b"precious"}


def test_commands_check_before_they_work(tmp_path, call, monkeypatch):
    monkeypatch.setattr(Generator, "compile", lambda *a, **k: pytest.fail("compiled"))
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, SOMEBODYS)
    before = runs.tree(tmp_path)
    sweep = ("sweep", "--policies=swa", "--budgets=0.5")
    for command, out in ((["run"], "."), (["run"], "/"), (sweep, f"../{tmp_path.name}")):
        status, _, err = call(*command, "--num_images=1", f"--out={out}", "--overwrite")
        assert status == 2 and "holds '" in err and "is not replaced: " in err, err
    assert runs.tree(tmp_path) == before
