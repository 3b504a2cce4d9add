"""`experiments.reproduce`: rows of a recipe to a table, what it refuses, and that it resumes."""

import json
import os
from signal import SIGINT

import pytest

from experiments import __main__ as overview
from experiments import reproduce
from experiments.recipes import recipe as recipes
from tests import models_under_test as models
from tests.experiments import made_up_sweep

FULL, SWA = "01-full", "02-swa-1-2"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """--checkpoint of a small model; recipes of rows and of steps for it are the only ones."""
    folder = models.checkpoint_folder("b_k6_sharedaln")
    classes = json.loads((folder / "model.json").read_text())["num_classes"]
    content = recipes.load("var-fid50k").content
    rows = content | {
        "run": {"top_k": 5, "num_images": "1/class", "resize": 20},
        "evaluate": {"metrics": "psnr,ssim"},
        "images": {"per_class": 1, "classes": classes, "count": classes},
        "rows": {"Full": "--policy=full", "SWA, 1/2": "--policy=swa --budget=0.5"},
        "published": {"SWA, 1/2": "PSNR 25.40, 3 GB", "elsewhere": "FID 1"},
    }
    flags = f"--checkpoint={folder} --labels=0,1 --policies=swa --budgets=0.5,1"
    steps = {
        "title": "Steps",
        "steps": [
            f"sweep {flags} --out={{out}}/first",
            "report --sweep={out}/first --out={out}/r.html",
        ],
        "published": {"first: swa, 0.2": "KL 0.12"},
    }
    (tmp_path / "recipes").mkdir()
    for name, made in (("rows", rows), ("steps", steps)):
        (tmp_path / "recipes" / f"{name}.json").write_text(json.dumps(made))
    monkeypatch.setattr(recipes, "FOLDER", tmp_path / "recipes")
    recipes.load.cache_clear()
    yield f"--checkpoint={folder}"
    recipes.load.cache_clear()


def test_a_table_of_rows(call, tiny, tmp_path, monkeypatch):
    """A run that failed is gone on with; finished rows are left alone."""
    out = tmp_path / "out"
    flags = ("--recipe=rows", tiny, "--run=--batch_size=6", f"--out={out}")
    with monkeypatch.context() as broken:
        broken.setattr("experiments.evaluate.__main__.compute", lambda *rest: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call("reproduce", *flags)
    status, text, err = call("reproduce", *flags)
    assert status == 0 and err.count("is there already") == 2 and "experiments.evaluate" in err
    found = json.loads((out / SWA / "metrics" / "metrics.json").read_text())
    assert f"| SWA, 1/2 | PSNR | 25.40 | {found['psnr']:.4g} | [" in text
    assert "| Full | PSNR | - | - | - |" in text and "- published, elsewhere: FID 1" in text
    assert text.startswith((out / "table.md").read_text())
    again, same, err = call("reproduce", *flags)
    assert again == 0 and same == text and err.count("is there already") == 3
    status, _, err = call("reproduce", *flags[:2], flags[3])
    assert status == 2 and "was begun with --run=--batch_size=6: give the same" in err


@pytest.mark.slow
def test_a_table_in_parts(call, tiny, tmp_path, monkeypatch):
    """Parts of every row; the last command joins and judges them. An interruption is told."""
    out, flags = tmp_path / "out", ("--recipe=rows", tiny, "--run=--batch_size=6")
    for shard in ("0/2", "1/2"):
        status, text, err = call("reproduce", *flags, f"--out={out}", f"--shard={shard}")
        assert status == 0 and not text, err
    assert not (out / FULL / "samples" / "report.json").exists()
    with monkeypatch.context() as broken:
        broken.setattr("experiments.merge.join_run", lambda *rest: os.kill(os.getpid(), SIGINT))
        status, text, err = call("reproduce", *flags, f"--out={out}")
    assert status == 130 and "the same command continues" in err and "| Full |" in text
    status, text, err = call("reproduce", *flags, f"--out={out}")
    assert status == 0 and (out / SWA / "samples" / "report.json").is_file(), err
    assert (
        call("reproduce", *flags, f"--out={tmp_path / 'whole'}")[1].splitlines()[:-1]
        == (text.splitlines()[:-1])
    )


def test_a_table_of_steps(call, tiny, tmp_path):
    """One that is finished is not run again; the folder is of one recipe."""
    out = tmp_path / "out"
    flags = ("--recipe=steps", f"--out={out}")
    with pytest.MonkeyPatch.context() as fast:
        fast.setattr(reproduce.Step, "run", lambda self: made_up_sweep.write_sweep(self.out) or 2)
        status, _, err = call("reproduce", *flags)
    assert status == 2 and "is not finished: the same command continues" in err
    report = json.loads((out / "first" / "sweep.json").read_text())
    report["cells"][0]["fidelity"] |= {"kl_low": 0.05, "kl_high": 0.25}
    (out / "first" / "sweep.json").write_text(json.dumps(report))
    status, text, err = call("reproduce", *flags)
    assert status == 0 and (out / "r.html").is_file() and "first is there already" in err
    assert "| first: swa, 0.2 | KL | 0.12 | 0.1 | [0.05, 0.25] |" in text
    assert "| first: swa, 0.5 | PSNR | - | 22 | - |" in text
    status, _, err = call("reproduce", "--recipe=rows", tiny, flags[1])
    assert status == 2 and f"{out} was begun with --recipe=steps: give the same" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--recipe=var-fid",), "did you mean 'var-fid50k'"),
        (("--recipe=heatkv-coco",), "demo is a model of the family var that draws from labels"),
        (("--recipe=amskv-table3",), "needs --reference=FILE (VIRTUAL_imagenet256_labeled.npz, "),
        (
            ("--recipe=amskv-table3", "--reference=x"),
            "needs --inception=DIR (download pt_inception",
        ),
        (("--recipe=amskv-table3", "--rows=1,6"), "--rows=6: recipe amskv-table3 has rows 1 to 5"),
        (("--recipe=amskv-table3", "--run='"), "--run=': No closing quotation"),
        (("--recipe=learned-demo", "--rows=1"), "--rows: the steps of learned-demo say what is"),
        (("--recipe=amskv-table3", "--run=--policy=full"), "--policy is said by the recipe"),
        (
            ("--recipe=var-fid50k", "--checkpoint=demo", "--reference=x", "--inception=x"),
            "--reference=x: there is no such file or folder",
        ),
        (("--recipe=var-fid50k", "--shard=0/2"), "needs --checkpoint=DIR (var-d16, "),
        (
            ("--recipe=var-fid50k", "--checkpoint=demo", "--shard=0/2", "--out=."),
            "holds other things than rows of a",
        ),
    ],
)
def test_wrong_input(refused, tmp_path, flags, message):
    if flags[-1] == "--out=.":
        flags = (*flags[:-1], f"--out={recipes.FOLDER}")
    refused("reproduce", message, *flags)


def test_what_the_paper_leaves_to_the_user(monkeypatch, tmp_path, call):
    """A dry run says the commands, whatever is lacking."""
    monkeypatch.chdir(tmp_path)
    given = ("--recipe=var-fid50k", "--dry_run", "--out=o", "--inception=I", "--run=--seed=1")
    status, out, err = call("reproduce", *given)
    assert status == 0 and "needs --reference=FILE" in err and not list(tmp_path.iterdir())
    samples = tmp_path / "o" / "01-full-cache" / "samples"
    run, evaluate = out.splitlines()
    assert run.endswith(
        f"experiments.run --recipe=var-fid50k --seed=1 --policy=full --out={samples}"
    )
    assert f"--samples={samples} --inception=I --out=" in evaluate


def test_the_steps_of_recipes_are_commands(tmp_path):
    """Their flags exist, and each writes below --out."""
    for step in reproduce.steps_of(recipes.load("learned-demo"), tmp_path):
        module = overview.imported(f"experiments.{step.command}")
        names = [argument.partition("=")[0].removeprefix("--") for argument in step.arguments]
        assert set(names) <= set(module.FLAGS.names()) and step.out.parent == tmp_path
        assert f"experiments.{step.command}" in overview.commands()
