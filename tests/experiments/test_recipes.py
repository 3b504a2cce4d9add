"""Recipes: their data files, how they become defaults, and what commands say of deviations."""

import json
import re

import numpy as np
import pytest

from experiments.evaluate import __main__ as evaluate
from experiments.evaluation import protocols
from experiments.recipes import recipe as recipes
from experiments.reproduce import LABELS
from experiments.run import __main__ as run
from tests import models_under_test as models
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.models.loading import describe
from varjax.policies import get_policy

KEYS = {"title", "source", "models", "run", "evaluate", "images", "reference", "rows"}
KEYS |= {"published", "unknown", "batch", "scorer"}
OF_ROWS = [name for name in recipes.names() if "rows" in recipes.load(name).content]


@pytest.mark.parametrize("name", OF_ROWS)
def test_data_files(name):
    """Flags and models are there, sources and what is unknown are named, counts fit."""
    found = recipes.load(name).content
    assert found.keys() <= KEYS and found["source"] and found["unknown"] and found["published"]
    families = {registry.preset(model).family for model in found["models"]}
    assert len(families) == 1
    assert set(found["run"]) <= set(run.FLAGS.names())
    if found["evaluate"] is None:
        assert found["scorer"]
    else:
        assert found["reference"] and set(found["evaluate"]) <= set(evaluate.FLAGS.values)
        assert set(found["evaluate"]["metrics"].split(",")) <= set(protocols.METRICS)
    images = found["images"]
    if "per_class" in images:
        assert images["per_class"] * images["classes"] == images["count"] == 50_000
        assert found["run"]["num_images"] == f"{images['per_class']}/class"
    printed = {n: found["published"].get(n, "") for n in found["rows"] if found["evaluate"]}
    for text in printed.values():
        assert isinstance(text, str) or set(text) <= set(found["models"])
    texts = [
        t for text in printed.values() for t in ([text] if isinstance(text, str) else text.values())
    ]
    assert all(
        set(re.findall("[A-Za-z]+(?= )", text)) <= {*LABELS.values(), "GB"} for text in texts
    )
    for flags in found["rows"].values():
        given = dict(flag.removeprefix("--").split("=", 1) for flag in flags.split())
        assert set(given) <= set(run.FLAGS.values)
        if "budgets=" not in flags:  # a file of the user's
            pairs = given.get("policy_args", "")
            pairs = dict(pair.split("=") for pair in pairs.split(",")) if pairs else {}
            get_policy(given["policy"], float(given.get("budget", 0)) or None, pairs)
    for model in found["models"]:
        config = registry.preset(model).configs["transformer"]
        settings = {k: v for k, v in found["run"].items() if k in ("top_k", "top_p")}
        assert 0 <= settings.get("top_k", 0) <= getattr(config, "vocab_size", 10**6)


def test_every_recipe_is_in_the_docs(request):
    text = (request.config.rootpath / recipes.DOCS).read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in recipes.names())


def test_settings_of_a_run(call):
    """Defaults are the recipe's; flags that are given win, and are told."""
    given = ("--model=var-d16", "--recipe=var-fid50k", "--dry_run", "--top_k=50")
    status, out, err = call("run", *given)
    assert status == 0, err
    assert "recipe var-fid50k is changed by --top_k=50" in out and "seed and batch" in out
    assert "this run draws" not in out and "which var-d16 is not" not in out
    status, out, _ = call("run", *given[:3], "--num_images=50000")
    assert "is changed" not in out and "this run draws" not in out  # 50 of each class as well
    status, out, _ = call("run", *given[:3], "--num_images=500")
    assert "takes 50 pictures of each class, 50000 in all; this run draws 500" in out
    status, out, _ = call("run", "--model=var-d16", "--recipe=amskv-table3", "--dry_run")
    assert "recipe amskv-table3 is of var-d30, which var-d16 is not" in out
    status, out, _ = call("run", "--model=infinity-2b", "--recipe=heatkv-coco", "--dry_run")
    assert status == 0 and "64x64" in out and "is changed" not in out


def test_what_a_recipe_does_not_name_is_told(call):
    """It would decide the pictures without a word."""
    given = ("--model=var-d16", "--recipe=var-fid50k", "--dry_run", "--tau=0.5", "--greedy")
    status, out, _ = call("run", *given, "--seed=3", "--batch_size=4")
    assert status == 0 and "recipe var-fid50k does not name --tau=0.5, which is given" in out
    assert "does not name --greedy=True" in out and "is changed" not in out
    assert out.count("does not name") == 2  # seed and batch are the user's, a count has its remark
    for command, names in recipes.DECIDING.items():
        assert set(names) <= set({"run": run, "evaluate": evaluate}[command].FLAGS.names())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ["--recipe=learned-demo"],
            "recipe learned-demo is one of steps: `python -m experiments.repro",
        ),
        (["--recipe=var-fid50"], "unknown recipe 'var-fid50': choose one of amskv-geneval"),
        (["--recipe=var-fid50k"], "recipe var-fid50k: top_k=900: choose 0 to 512"),
        (["--recipe=heatkv-coco"], "demo is a model of the family var that draws from labels"),
        (["--recipe=var-fid50k", "--model=llamagen-t2i-xl-256"], "that draws from text"),
        (["--num_images=0/class"], "--num_images=0: choose 1 to"),
        (["--num_images=2/prompt"], "write a number of images, or how many of each, as 4/class"),
        (["--resize=4"], "--resize=4 is not valid"),
    ],
)
def test_wrong_flags_of_run(refused, flags, problem):
    refused("run", problem, "--dry_run", *flags, "--out=out")


@pytest.mark.slow
def test_a_run_by_recipe_and_its_evaluation(call, tmp_path, monkeypatch):
    """Pictures of each class are exact, and resized; the report and the evaluation say how."""
    content = recipes.load("var-fid50k").content
    images = {"per_class": 2, "classes": 12, "count": 24}
    settings = {"cfg": "1.5", "top_k": 5, "num_images": "2/class", "resize": 20}
    tiny = content | {"run": settings, "images": images, "evaluate": {"metrics": "psnr"}}
    model = f"--checkpoint={models.checkpoint_folder('b_k6_sharedaln')}"
    classes = json.loads((models.checkpoint_folder("b_k6_sharedaln") / "model.json").read_text())
    images["classes"], images["count"] = classes["num_classes"], 2 * classes["num_classes"]
    monkeypatch.setattr(recipes, "names", lambda: ["tiny"])
    (tmp_path / "tiny.json").write_text(json.dumps(tiny))
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)
    out = tmp_path / "out"
    given = (model, "--recipe=tiny", "--policy=streaming", "--budget=0.5", f"--out={out}")
    status, _, err = call("run", *given, "--cfg=2")
    assert status == 0 and "recipe tiny is changed by --cfg=2" in err, err
    with np.load(out / "samples.npz") as found:
        assert found["arr_0"].shape[1:] == (20, 20, 3)
        assert (np.bincount(found["arr_1"]) == 2).all()
    report = json.loads((out / "report.json").read_text())
    assert report["recipe"]["name"] == "tiny" and report["recipe"]["changed"] == {"cfg": "2"}
    assert report["sampling"]["top_k"] == 5 and report["resize"] == 20
    given = ("--recipe=tiny", f"--samples={out}", f"--full={out}", f"--out={tmp_path / 'e'}")
    status, _, err = call("evaluate", *given)
    assert status == 0 and "the samples were drawn with --cfg=2" in err, err
    said = json.loads((tmp_path / "e" / "metrics.json").read_text())
    assert said["recipe"]["recipe"]["name"] == "tiny" and "ssim" not in said
    np.savez(tmp_path / "few.npz", arr_0=np.zeros((5, 20, 20, 3), np.uint8))
    given = ("--recipe=tiny", f"--samples={tmp_path / 'few.npz'}", *given[2:3])
    status, _, err = call("evaluate", *given, f"--out={tmp_path / 'f'}")
    assert status == 2 and "few.npz has 5 pictures: recipe tiny takes" in err
    status, _, err = call("evaluate", *given, "--recipe=none")
    assert status == 2 and "unknown recipe 'none'" in err
    recipes.load.cache_clear()


def test_a_recipe_of_another_program(call):
    status, _, err = call("evaluate", "--recipe=heatkv-geneval", "--samples=x")
    assert status == 2 and "is scored by GenEval's own program" in err
    given = ("--recipe=var-fid50k", "--features=demo", "--samples=x", "--reference=y")
    status, _, err = call("evaluate", *given)
    assert status == 2 and "recipe var-fid50k belongs to --features=inception" in err


def test_samples_of_a_recipe():
    """Counts of classes are exact; other runs are told."""
    recipe = recipes.load("var-fid50k")
    labels = np.repeat(np.arange(1000), 50)
    recipe.check_samples("x", 50_000, labels)
    recipe.check_samples("x", 50_000, None)
    labels[0] = 1
    with pytest.raises(UserError, match=r"50000 pictures \(1000 classes, 49 to 51 of each\)"):
        recipe.check_samples("x", 50_000, labels)
    assert "no report.json" in recipe.report_remarks(None)[0]
    assert "not drawn with --recipe" in recipe.report_remarks({"recipe": None})[0]
    made = {"recipe": {"name": "var-fid50k", "changed": {"cfg": "4"}}}
    assert recipe.report_remarks(made) == ["the samples were drawn with --cfg=4"]
    made["recipe"]["added"] = {"tau": "0.5"}
    assert recipe.report_remarks(made)[1:] == ["the samples were drawn with --tau=0.5"]
    assert "takes 5000 pictures" in recipes.load("heatkv-coco").remarks(describe(), 1)[1]
