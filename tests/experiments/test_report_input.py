"""`experiments.report` refuses damaged sweeps and places that cannot be written."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
from experiments.report import page  # noqa: E402


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda folder: shutil.rmtree(folder), "no finished sweep"),
        (lambda folder: (folder / "samples.npz").write_bytes(b"x"), "damaged"),
        (lambda folder: (folder / "sweep.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "sweep.json").write_text("{}"), "format_version"),
        (lambda folder: (folder / "calibration.json").write_text("[]"), "calibration"),
    ],
)
def test_unusable_sweeps_are_refused(call, sweep, tmp_path, change, message):
    change(sweep)
    status, _, err = call("report", f"--sweep={sweep}", f"--out={tmp_path / 'report.html'}")
    assert status == 2 and message in err and not (tmp_path / "report.html").exists()


REMOVED, WRONG = object(), "wrong"


@pytest.mark.parametrize(
    "keys, value, message",
    [
        (["geometry"], REMOVED, "sweep.json: $: 'geometry' is a required"),
        (["geometry", "num_layers"], 2.5, "geometry.num_layers: 2.5 is not"),
        (["geometry", "schedule"], "1x1;2x2", "cells[0].live_tokens is not 2 lists of 3"),
        (["cells", 0, "kv", "allocated_bytes"], 0, "cells[0].kv.allocated_bytes: 0 is less than"),
        (["cells", 0, "budget"], 7, "cells[0].budget: 7 is"),
        (["cells", 0, "fidelity", "psnr"], WRONG, "cells[0].fidelity.psnr: 'wrong' is"),
        (["cells", 0, "time", "steady_s_per_image"], 5e-324, "steady_s_per_image: 5e-324 is less"),
        (["settings", "batch_size"], 2.5, "settings.batch_size: 2.5 is not"),
        (["versions"], {"jax": 1}, "versions.jax: 1 is not"),
        # a lone surrogate, which JSON may hold and no page
        (["definitions"], {"\ud800": "x"}, "surrogates not allowed"),
        (["cells", 0, "fidelity", "ssim"], "nan", "OK"),
        (["sample_names"], ["one"], "samples.npz: 2 images, but 1 names in sweep.json"),
        (["cells", 0, "samples"], "c9", "samples.npz: the array c9 is missing"),
        (["cells", 0, "samples_fidelity", "kl"], [0.1], "2 images of swa, other counts"),
    ],
)
def test_damaged_reports_are_refused(call, sweep, tmp_path, keys, value, message):
    content = json.loads((sweep / "sweep.json").read_text())
    *path, last = keys
    inner = content
    for key in path:
        inner = inner[key]
    inner[last] = value
    if value is REMOVED:
        del inner[last]
    (sweep / "sweep.json").write_text(json.dumps(content))
    if message == "OK":
        assert call("report", f"--sweep={sweep}", f"--out={tmp_path / 'x.html'}")[0] == 0
    else:
        check_refused(call, sweep, tmp_path, message)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"full": None}, "the array full is missing"),
        ({"full": np.zeros((2, 16), np.uint8)}, "full is uint8 (2, 16)"),
        ({"c2": np.zeros((1, 16, 16, 3), np.uint8)}, "c2 has shape"),
        ({"kept/c2": np.zeros((16, 16), np.uint8)}, "kept/c2 is uint8 (16, 16)"),
        ({"full": np.zeros((2, 1, 17000, 3), np.uint8)}, "full has shape (2, 1, 17000, 3): sides"),
    ],
)
def test_damaged_samples_are_refused(call, sweep, tmp_path, change, message):
    with np.load(sweep / "samples.npz") as archive:
        arrays = {name: archive[name] for name in archive.files} | change
    arrays = {name: array for name, array in arrays.items() if array is not None}
    np.savez(sweep / "samples.npz", **arrays)
    check_refused(call, sweep, tmp_path, f"samples.npz: {message}")


def check_refused(call, sweep, tmp_path, message):
    out = tmp_path / "report.html"
    status, text, err = call("report", f"--sweep={sweep}", f"--out={out}")
    assert status == 2 and not text and not out.exists(), err
    assert err.startswith(f"error: --sweep={sweep}: its files are damaged: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "out, message",
    [
        ("/proc/x.html", "cannot write /proc/x.html: nothing can be created in /proc"),
        ("/nowhere/at/all.html", "there is no folder /nowhere/at"),
        (".", "is a folder"),
    ],
)
def test_places_that_cannot_be_written(call, sweep, monkeypatch, out, message):
    monkeypatch.setattr(page, "build", lambda *a: pytest.fail("drawn"))
    status, _, err = call("report", f"--sweep={sweep}", f"--out={out}", "--overwrite")
    assert status == 2 and message in err and ".x.html" not in err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--sweep=none", "--out=x.doc"], "--out=x.doc: choose a name that ends in .html, .htm, "),
        (["--leaderboard=none", "--out=x.tex"], "choose a name that ends in .html, .htm\n"),
        (["--leaderboard=none", "--images=3"], "--images is for .html, .htm of a --sweep: leave"),
        (["--sweep=none", "--columns=policy"], "--columns is for .tex, .md of a --sweep: leave"),
        (["--sweep=none", "--out=x.pdf", "--metrics=kl,psnr"], "a figure shows one metric"),
    ],
)
def test_flags_without_effect_are_refused_before_anything_is_read(refused, flags, message):
    refused("report", message, *flags)
