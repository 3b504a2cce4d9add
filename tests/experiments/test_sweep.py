"""`experiments.sweep`: its table and files, what it refuses, and that it resumes."""

import csv
import hashlib
import json
import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image

from experiments.report import sweep_files
from experiments.sweep import __main__ as command
from experiments.sweep import plan, tables
from experiments.sweep.cells import CellRunner
from tests import models_under_test as models
from tests.experiments import made_up_sweep
from tests.experiments.conftest import report_of
from varjax.calibration import files as calibration_lib
from varjax.core.errors import UserError
from varjax.generation import kept
from varjax.generation.api import Generator
from varjax.models.loading import describe

FILES = ["fidelity.png", "samples.npz", "sweep.csv", "sweep.json", "sweep.md"]


def file_digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_all_lines_count_the_same_cells(call, checkpoint, tmp_path, monkeypatch):
    """Without the full cache, and those that compute the same once."""
    end = lambda self: (_ for _ in ()).throw(self._stopped())  # noqa: E731, the system asks to end
    monkeypatch.setattr(CellRunner, "_run_full", end)
    policies = "--policies=swa,streaming:sinks=5,swa:accounting=bytes"
    flags = (checkpoint, "--labels=3", policies, "--budgets=0.05,1", f"--out={tmp_path / 'out'}")
    status, _, err = call("sweep", *flags)
    assert status == 0 and "3 of 4 cells can run" in err, err
    assert "0 of 3 cells are stored" in err


def test_table_files_and_resumption(call, checkpoint, tmp_path, monkeypatch, request):
    """Interrupted in the second cell; started again, only what is missing runs."""
    out = tmp_path / "out"
    policies = "--policies=swa,streaming:sinks=5"
    flags = (checkpoint, "--labels=3,7,7", "--batch_size=2", "--segments=1", "--samples=2")
    flags += ("--save_kept",)
    to, budgets = f"--out={out}", "--budgets=0.05,1"  # five sinks need more than 5 %
    start, ran, plans = Generator._start, [], {}

    def counts(self, *args, **options):
        plans.setdefault((self.policy.name, self.policy.budget), self.plan)
        if self.policy.name == "streaming" and "again" not in ran:
            raise KeyboardInterrupt
        ran.append(self.policy.name)
        return start(self, *args, **options)

    monkeypatch.setattr(Generator, "_start", counts)
    status, _, err = call("sweep", *flags, to, policies, budgets)
    assert status == 130 and not out.exists(), err
    # at a budget of 1 both policies keep everything, as the full cache does: the same program
    full, small, whole, streaming = plans.values()
    assert full == whole == streaming != small
    assert "cells 2/3" in err and " left" in err
    assert call("sweep", *flags, to, policies, budgets, "--seed=1")[0] == 2  # other settings
    ran[:] = ["again"]
    status, text, err = call("sweep", *flags, to, policies, budgets)
    assert status == 0 and "2 of 3 cells are there already" in err
    assert "cells 2/3" not in err and "cells 3/3" in err
    assert "swa" not in ran and "streaming" in ran
    assert sorted(p.name for p in out.iterdir()) == FILES
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert text.strip() in (out / "sweep.md").read_text(encoding="utf-8")

    report = report_of(out, "sweep.json")
    assert [(c["label"], c["budget"], c["status"]) for c in report["cells"]] == [
        ("swa", 0.05, "done"),
        ("swa", 1, "done"),
        ("streaming:sinks=5", 0.05, "infeasible"),
        ("streaming:sinks=5", 1, "done"),
    ]
    small, whole, refused, _ = report["cells"]
    assert "smallest feasible budget" in refused["reason"] and refused["reason"] in text
    assert small["fidelity"]["kl"] > 0.01 and small["fidelity"]["token_agreement"] < 1
    assert whole["fidelity"]["kl"] == pytest.approx(0, abs=1e-6)
    assert whole["fidelity"]["token_agreement"] == 1
    assert small["kv"]["allocated_bytes"] == small["kv"]["planned_bytes"]
    assert small["kv"]["allocated_bytes"] <= 0.05 * small["kv"]["dense_bytes"]
    assert small["time"]["timed_runs"] >= 2 and small["time"]["steady_s_per_image"] > 0
    slots = np.array(small["used_slots"])
    assert slots.max() == small["kv"]["pool_slots"] and (slots >= small["live_tokens"]).all()
    assert small["kv"]["slot_bytes"] * small["kv"]["pool_slots"] == small["kv"]["planned_bytes"]

    sweep_files.read_sweep(out)  # which the report does
    with np.load(out / "samples.npz") as samples, open(out / "sweep.csv") as table:
        assert samples["full"].shape == samples[small["samples"]].shape == (2, 16, 16, 3)
        assert samples["labels"].tolist() == [3, 7]
        plan, (first, *_) = plans["swa", 0.05], samples[small["samples"]]
        wanted = kept.kept_picture(plan, kept.of_image(plan, None), first)
        np.testing.assert_array_equal(samples[f"kept/{small['samples']}"], wanted)
        numbers = samples[f"{small['samples']}/psnr"]  # of all images
        assert numbers.shape == (3,) and numbers.mean() == pytest.approx(small["fidelity"]["psnr"])
        rows = list(csv.DictReader(table))
    assert [row["label"] for row in rows] == ["full"] + [c["label"] for c in report["cells"]]
    assert float(rows[1]["psnr"]) == pytest.approx(small["fidelity"]["psnr"])
    assert rows[3]["note"] == refused["reason"] and rows[3]["psnr"] == rows[3]["psnr_low"] == ""
    assert float(rows[1]["psnr_low"]) <= float(rows[1]["psnr"]) <= float(rows[1]["psnr_high"])
    assert "dB [" in text and "image by image:" in (out / "sweep.md").read_text(encoding="utf-8")

    assert call("sweep", *flags, to, policies, budgets)[0] == 2  # the folder exists
    if request.config.getoption("--slow"):
        _assert_a_run_measures_the_same(call, small, *flags[:4], f"--out={out}-run")


@pytest.mark.slow
def test_what_a_policy_decided_is_told(call, checkpoint, tmp_path):
    """The picture of a run with the same settings."""
    flags = (checkpoint, "--labels=3", "--batch_size=1", "--segments=1", "--save_kept")
    policy = "--policies=snapkv", "--budgets=0.5"
    status, _, err = call("sweep", *flags, *policy, f"--out={tmp_path / 'sweep'}")
    assert status == 0, err
    run = "--policy=snapkv", "--budget=0.5", f"--out={tmp_path / 'run'}"
    assert call("run", *flags, *run)[0] == 0
    (cell,) = report_of(tmp_path / "sweep", "sweep.json")["cells"]
    with np.load(tmp_path / "sweep" / "samples.npz") as samples:
        found = samples[f"kept/{cell['samples']}"]
    np.testing.assert_array_equal(found, np.asarray(Image.open(tmp_path / "run" / "kept.png")))


def _assert_a_run_measures_the_same(call, cell, *flags):
    """`experiments.run` with the policy and the budget of a cell."""
    status, _, err = call(
        "run", *flags, f"--policy={cell['label']}", f"--budget={cell['budget']}", "--compare"
    )
    assert status == 0, err
    file = pathlib.Path(flags[-1].removeprefix("--out=")) / "report.json"
    report = json.loads(file.read_text(encoding="utf-8"))
    for name in ("psnr", "ssim", "token_agreement"):
        found, single = cell["fidelity"][name], report["fidelity"][name]
        assert found == pytest.approx(single, rel=1e-4), name


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--policies=swap"], "did you mean 'swa'"),
        (["--policies=swa,swa"], "twice"),
        (["--policies=all,all"], "names all twice"),
        (["--policies=swa:budget=0.1"], "--budgets"),
        (["--policies=swa:sinks=1"], "no argument 'sinks'"),
        (["--policies=all:sinks=1"], "no arguments"),
        (["--policies=heatkv", "--cfg=7"], "needs measurements"),
        (["--policies=streaming:sinks=5", "--budgets=0.01,0.02"], "smallest feasible budget"),
        (["--policies=swa", "--calibration=CAL"], "leave out --calibration"),
        (["--budgets=0.1,much"], "fractions"),
        (["--budgets=0.1,1.5"], "outside (0, 1]"),
        (["--budgets=0.1,0.1"], "twice"),
        (["--checkpoint=var-d30"], "published model without weights"),
    ],
)
def test_wrong_input_ends_before_compiling(call, tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr(Generator, "compile", lambda *a, **k: pytest.fail("compiled"))
    calibration = tmp_path / "calibration.json"
    calibration.write_text('{"format_version": 1}')
    flags = [flag.replace("CAL", str(calibration)) for flag in flags]
    status, _, err = call("sweep", *flags, f"--out={tmp_path / 'out'}")
    assert status == 2 and message in err, err
    assert [p.name for p in tmp_path.iterdir()] == [calibration.name]


def test_both_calibrations(call, tmp_path, monkeypatch):
    """A sweep names the files that its policies use, of the flags and of the checkpoint."""
    seen, embedded = [], describe().directory
    monkeypatch.setattr(command, "make", lambda sweep, *rest: seen.append(sweep))
    monkeypatch.setattr("varjax.policies.last_uses.STEPS", 1)  # any tables will do
    digest = {name: file_digest(embedded / name) for name in calibration_lib.BESIDE}
    measured, learned = digest["calibration.json"], digest["learned.npz"]
    own = tmp_path / "tables.npz"
    shutil.copy(embedded / "learned.npz", own)
    mine = f"--learned={own}"
    for policies, flags, used in (
        ("heatkv", (), measured),
        ("learned", (), learned),
        ("heatkv,learned,swa", (mine, f"--calibration={embedded / 'calibration.json'}"), None),
        ("compose:allocate=learned+select=hack", (mine,), None),
        ("learned", (f"--calibration={own}",), learned),
    ):
        status, _, err = call("sweep", f"--policies={policies}", "--budgets=0.2", *flags)
        assert status == 0, err
        assert seen[-1].describe()["calibration"] == (used or f"{measured}+{learned}")
        assert (seen[-1].calibration is None) == (used == learned)
    for flags, message in (
        (("--policies=heatkv", mine), "none of the policies uses learned tables: leave out"),
        (
            ("--policies=learned", mine, f"--calibration={own}"),
            "both hold what learned.npz does: give one",
        ),
    ):
        status, _, err = call("sweep", *flags)
        assert status == 2 and message in err, err
    run = ("--dry_run", "--policy_args=allocate=learned,select=hack", "--policy=compose", mine)
    assert call("run", *run, f"--calibration={embedded / 'calibration.json'}")[0] == 0
    status, _, err = call("run", "--dry_run", "--policy=heatkv", mine, f"--calibration={own}")
    assert status == 2 and "policy 'heatkv' reads no learned.npz: leave out --learned" in err


def test_entries():
    entries = plan.parse_entries("headkv, streaming:sinks=3+block_size=8,table:path=a,b+c.npz")
    assert [(e.name, e.arguments) for e in entries] == [
        ("headkv", {}),
        ("streaming", {"sinks": "3", "block_size": "8"}),
        ("table", {"path": "a,b+c.npz"}),
    ]
    assert entries[1].label == "streaming:sinks=3+block_size=8"
    everything = [e.name for e in plan.parse_entries("all,swa")]
    assert {"swa", "headkv"} <= set(everything) and not {"full", "table"} & set(everything)
    assert len(set(everything)) == len(everything)
    with pytest.raises(UserError, match="key=value"):
        plan.parse_entries("streaming:3")


def test_grids(call):
    """Every pair of values is an entry; many cells have to be confirmed."""
    entries = plan.parse_entries("headkv:window=2|4:sinks=0|2+ratio=0.7,swa")
    assert [entry.label for entry in entries] == [
        *(f"headkv:window={w}+sinks={s}+ratio=0.7" for w in (2, 4) for s in (0, 2)),
        "swa",
    ]
    many = "|".join(map(str, range(1, 51)))
    text = f"headkv:window={many}:sinks={many}"
    status, out, err = call("sweep", f"--policies={text}", "--budgets=0.1,0.2,0.3,0.4")
    assert status == 2 and not out and "asks for 10000 cells: add --yes" in err
    assert len(plan.parse_entries(text, 4, True)) == 2500
    for wrong, words in (
        (f"{text}:ratio={many}", "fewer values"),
        ("headkv:window=2||4", "empty value"),
        ("headkv::window=2", "cannot read 'headkv::window=2'"),
        ("headkv:window=2|2", "twice"),
    ):
        with pytest.raises(UserError, match=words):
            plan.parse_entries(wrong, confirmed=True)


def test_the_plot_over_an_argument(tmp_path):
    """A chart for each argument with several values: x is its value, budgets are lines."""
    charts = pytest.importorskip("experiments.report.charts", reason="needs the extra eval")
    rows = [
        {"label": f"headkv:window={w}+score={s}", "status": "done", "budget": b, "kl": w * b}
        for w in (2, 16, 4)
        for s in "ab"
        for b in (0.1, 0.25)
    ]
    rows += [rows[0] | {"status": "infeasible"}, rows[0] | {"label": "swa", "kl": 1.0}]
    window, score = (chart.to_dict() for chart in charts.over_arguments(rows))
    points = {(p["policy"], p["x"]): p["value"] for p in window["data"]["values"]}
    assert points["headkv:score=b at 0.25", 16] == 4 and len(points) == 12
    assert {x for _, x in points} == {2, 4, 16}
    assert {p["x"] for p in score["data"]["values"]} == {"a", "b"}
    charts.save(tmp_path / "none.png", rows[-1:], charts.over_arguments)
    assert not (tmp_path / "none.png").exists()


def test_without_calibration_all_says_who_needs_one():
    geometry = models.fixture_model("b_k6_sharedaln").geometry
    entries = plan.parse_entries("all")
    cells = plan.plan_cells(entries, [0.001, 0.5], geometry, None, 2)
    rows = {}
    for cell in cells:
        rows.setdefault(cell.label, []).append(cell)
    (skipped,) = rows["heatkv"]
    assert skipped.plan is None and skipped.budget is None and "a calibration" in skipped.reason
    assert [c.plan is None for c in rows["swa"]] == [True, False]
    assert "smallest feasible budget" in rows["swa"][0].reason


def test_given_sizes_are_not_swept():
    """Their budget is what they cost; only a policy with its arguments can tell."""
    geometry = models.fixture_model("b_k6_sharedaln").geometry
    text = "amskv:cmin=8+cmax=20+layers=0,amskv:layers=0,"
    text += "compose:allocate=amskv+allocate_cmin=8+allocate_cmax=20+allocate_layers=0+select=swa"
    cells = plan.plan_cells(plan.parse_entries(text), [0.3, 0.5], geometry, None, 2)
    given, *swept, composed = cells
    assert [cell.budget for cell in swept] == [0.3, 0.5]
    for cell in (given, composed):
        assert cell.budget == cell.plan.budget not in (0.3, 0.5, 0.25)
        assert cell.plan.capacity.max() == 20


def test_every_cell_has_a_key_of_its_own(tmp_path):
    """Composed policies hold policies; they too can be told apart and written down."""
    geometry = made_up_sweep.GEOMETRY
    made_up_sweep.write_calibration(tmp_path / "calibration.json")
    calibration = calibration_lib.load(tmp_path / "calibration.json", geometry)
    text = "all,compose:allocate=heatkv+select=snapkv,compose:allocate=heatkv+select=h2o"
    entries = plan.parse_entries(text)
    cells = plan.plan_cells(entries, [0.4], geometry, calibration, 2)
    planned = {cell.label: cell.key for cell in cells if cell.plan}
    snapkv, h2o = (planned.pop(entry.label) for entry in entries[-2:])
    assert planned.pop("compose") == snapkv != h2o  # the former is what compose is by default
    assert len({*planned.values(), snapkv, h2o}) == len(planned) + 2 > 5


LABELS = ("table:path=$\\frac$.npz", "table:path=a$b.npz", "\udcff\ud800", "x" * 10**5, "a\0b")


def test_any_label_can_be_written_and_drawn(tmp_path, monkeypatch):
    pytest.importorskip("vl_convert", reason="vl_convert is not installed (extra `eval`)")
    made_up_sweep.write_sweep(tmp_path / "sweep")
    report = json.loads((tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8"))
    report["settings"]["calibration"] = None
    report["versions"]["jax"] = "0"
    done = next(cell for cell in report["cells"] if cell["status"] == "done")
    report["cells"] = [done | {"label": label} for label in LABELS]
    monkeypatch.setattr(tables, "content", lambda found, results: report)
    monkeypatch.setattr(tables, "samples", lambda found, results: {"labels": np.zeros(1)})
    out = tmp_path / "out"
    tables.write_tables(out, None, {}, {}, b"{}")
    assert all((out / f"{name}.png").stat().st_size > 10**4 for name in ("fidelity", "arguments"))
    assert "\\udcff\\ud800" in (out / "sweep.md").read_text(encoding="utf-8")
    with open(out / "sweep.json", encoding="utf-8") as file:
        assert [cell["label"] for cell in json.load(file)["cells"]] == list(LABELS)
