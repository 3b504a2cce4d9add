"""`experiments.report` from a small made-up sweep: sections, one file, a browser that agrees."""

import base64
import io
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from experiments.report import sweep_files
from experiments.sweep import intervals, tables
from tests.experiments import made_up_sweep
from tests.experiments.html_page import check_self_contained
from tests.experiments.made_up_sweep import GEOMETRY
from varjax.calibration import files as measured
from varjax.calibration.data import Calibration
from varjax.policies import HeatKV

for package in ("altair", "jinja2", "vl_convert", "PIL"):
    pytest.importorskip(package)
from experiments.report import calibration_charts, charts, page  # noqa: E402

BROWSER = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--enable-logging=stderr --v=0 --virtual-time-budget=5000 --dump-dom"
).split()


@pytest.fixture
def calibration(tmp_path):
    """A file with everything that can be drawn."""
    path = tmp_path / "calibration.json"
    made_up_sweep.write_calibration(path)
    return path


def pixels(uri):
    picture = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    return np.asarray(picture.convert("RGB"))


def test_everything_is_there_in_one_file(call, sweep, calibration, tmp_path):
    out = tmp_path / "report.html"
    flags = (f"--sweep={sweep}", f"--out={out}")
    status, text, err = call("report", *flags, f"--calibration={calibration}")
    assert status == 0 and "report.html" in text, err
    text = out.read_text(encoding="utf-8")
    found = check_self_contained(text)
    assert len(text) < 2 * 2**20
    assert 'class="missing">There' not in text and "Every stored scale" not in text
    assert "KV-cache policies on made <up>" in found.texts and "KL <i>" in found.texts
    for source in ("AMS-KV, Figure 4", "AMS-KV, Figure 6", *(f"HeatKV, Figure {i}" for i in "46")):
        assert source in " ".join(text.split())
    assert "20.0 dB, SSIM 0.900" in text and "identical" in text
    pictures = [r for r in found.resources if r.startswith("data:image")]
    with np.load(sweep / "samples.npz") as samples:
        wanted = [image for name in ("c1", "c2", "c3") for image in samples[name]]
        full = re.findall(r"\.full\d \{ background-image: url\((data:[^)]*)\)", text)
        np.testing.assert_array_equal([pixels(uri) for uri in full], samples["full"])
    np.testing.assert_array_equal([pixels(uri) for uri in pictures], wanted)

    assert call("report", *flags)[0] == 2  # the file exists
    assert call("report", *flags, "--overwrite", "--images=1")[0] == 0
    text = out.read_text(encoding="utf-8")
    check_self_contained(text)
    assert text.count("python -m experiments.calibrate") == 4
    assert "--stability=10" in text and "1 more samples" in text
    shutil.copy(calibration, sweep / "calibration.json")
    assert call("report", *flags, "--overwrite")[0] == 0  # the sweep's own calibration
    assert "experiments.calibrate" not in out.read_text(encoding="utf-8")


def test_no_text_becomes_markup(sweep, calibration):
    """The elements of the page are the same whatever its texts say."""

    def built(word):
        report, samples, geometry = sweep_files.read_sweep(sweep)
        settings = report["settings"]
        settings |= {"model": word, "dtype": word, "kv_dtype": word, "sampling": {word: word}}
        settings["calibration"] = word
        report |= {"device": word, "versions": {word: word}, "definitions": {word: word}}
        report["sample_names"] = [word] * 2
        for i, cell in enumerate([report["reference"], *report["cells"]]):
            cell |= {"label": f"{word}{i}", "policy": word}
            cell |= {"reason": word} if "reason" in cell else {}
        found = measured.load(calibration, geometry)
        return check_self_contained(page.build(report, samples, geometry, found, 2))

    hostile = """'"><img src="http://a/b"></title></style></script><script>{{ 1 }}"""
    assert built(hostile).tags == built("x").tags


def test_intervals_are_shown(sweep):
    report, samples, geometry = sweep_files.read_sweep(sweep)
    assert "No intervals are known" in page.build(report, samples, geometry, None, 1)
    numbers = {f"c{i}": {"psnr": np.array([19.0, 21.0]) + i} for i in (1, 2, 3)}
    intervals.add(report["cells"], numbers)
    report["cells"][0]["fidelity"]["lpips"] = 0.1
    text = page.build(report, samples, geometry, None, 1)
    found = check_self_contained(text)
    assert "[20.00, 22.00]" in found.texts and "best" in found.texts
    assert "is defined below the table.\nBars are 95 % intervals" in text
    assert found.tags.count("table") == 2 and "What heads kept" not in text
    samples["kept/c1"] = np.arange(90, dtype=np.uint8).reshape(5, 6, 3)
    text = page.build(report, samples, geometry, None, 1)
    *_, shown = (r for r in check_self_contained(text).resources if r.startswith("data:image"))
    assert "What heads kept" in text
    np.testing.assert_array_equal(pixels(shown), samples["kept/c1"])
    (psnr, *others) = charts.fidelity(tables.rows(report)[1:])
    assert len(psnr.to_dict()["layer"]) == 3 and len(others[0].to_dict()["layer"]) == 2


def open_in_browser(text, tmp_path):
    """(the document after its scripts ran, what the console said) of a page with this text."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs chromium, which is not installed")
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [browser, *BROWSER, f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_a_browser_runs_it_without_errors(call, sweep, calibration, tmp_path):
    out = tmp_path / "report.html"
    flags = (f"--sweep={sweep}", f"--out={out}", f"--calibration={calibration}")
    assert call("report", *flags)[0] == 0
    text, end, rest = out.read_text(encoding="utf-8").rpartition("</body>")
    # what a user does: a slider, menus, headings, a legend; then the page is read back
    steps = """<script>
      const fire = (e) => e.dispatchEvent(new Event("input", { bubbles: true }));
      const settled = () => new Promise((go) => setTimeout(go, 20));
      async function use() {
        const slider = document.querySelector("input[type=range]");
        slider.value = "20"; fire(slider);
        for (const menu of document.querySelectorAll("select"))
          for (const option of [...menu.options]) {
            menu.value = option.value; fire(menu); await settled();
          }
        document.querySelectorAll("th button")[4].click();
        document.querySelectorAll("[name=front]")[1].click();
        await settled();
        const root = document.documentElement, figures = [...document.querySelectorAll("figure")];
        root.dataset.wiped = getComputedStyle(document.querySelector(".tiles"))
          .getPropertyValue("--wipe");
        root.dataset.charts = figures.map((f) => f.querySelectorAll(".chart svg").length).join(" ");
        root.dataset.faint = document.querySelectorAll("#fidelity svg [opacity='0.13']").length;
        root.dataset.broken = document.querySelectorAll("svg [d*=NaN]").length;
        root.dataset.used = "1";
      }
      const wait = setInterval(() => {
        if (document.documentElement.dataset.ready) { clearInterval(wait); use(); }
      }, 20);
    </script>"""
    document, console = open_in_browser(text + steps + end + rest, tmp_path)
    assert not console, console
    root = re.search(r"<html[^>]*>", document)[0]
    assert 'data-used="1"' in root and 'data-broken="0"' in root and 'data-wiped="20%"' in root, (
        root
    )
    assert 'aria-sort="ascending"' in document
    counts = [int(n) for n in re.search(r'data-charts="([^"]*)"', root)[1].split()]
    assert counts[1:4] == [4, 0, 1] and counts[4:6] == [1, 1] and counts[-1] == 1, root
    assert int(re.search(r'data-faint="(\d+)"', root)[1]) > 0
    # the last choices: a policy that was skipped, and one that was not run at this budget
    assert re.search(r'<div class="tile" data-policy="heatkv"\s*>\s*<p class="absent">', document)


# --- figures ---


def test_attention_density_is_the_papers():
    """d[i <- j] by summing an attention matrix."""
    rng = np.random.default_rng(0)
    tokens = GEOMETRY.schedule.tokens
    attention = rng.dirichlet(np.ones(sum(tokens)), size=(3, 4, tokens[-1]))
    beta = np.zeros((3, 4, 5, 5))
    beta[..., -1, :] = np.add.reduceat(attention.mean(-2), GEOMETRY.schedule.starts, axis=-1)
    found = Calibration(schedule=GEOMETRY.schedule, beta=beta).attention_density
    for i, (start, end) in enumerate(
        zip(GEOMETRY.schedule.starts, GEOMETRY.schedule.ends, strict=True)
    ):
        wanted = attention[..., start:end].sum((-2, -1)) / tokens[i]
        np.testing.assert_allclose(found[..., i], wanted)


def data_of(chart):
    """The rows that all layers of a chart share."""
    return chart.to_dict()["data"]["values"]


def test_charts_hold_the_numbers(sweep, calibration):
    report, _, geometry = sweep_files.read_sweep(sweep)
    found = measured.load(calibration, geometry)
    cell = report["cells"][0]
    mebi = np.array(cell["used_slots"]).ravel() * cell["kv"]["slot_bytes"] / 2**20
    drawn = data_of(charts.live_bytes(report)["chart"])
    assert [row["cell"] for row in drawn] == ["swa at 0.2", "swa at 0.5", "streaming at 0.5"]
    np.testing.assert_allclose(drawn[0][charts.USED][:-1], mebi, rtol=1e-4)
    pruning = calibration_charts.pruning([0.5], geometry, found)
    policy, budget, removals = list(pruning)[1]
    assert (policy, budget) == ("heatkv", "0.5")
    prepared = HeatKV(budget=0.5).rule("scales").prepare(geometry, found)
    last_use = prepared.rule("scales").schedule(geometry, 0.5).last_use()
    names = [*charts.scale_names(geometry.schedule), "never"]
    for source, chart in enumerate(removals, start=prepared.sinks):
        words = [row["given up"] for row in data_of(chart)]
        wanted = [[names[s + 1] for s in row] for row in last_use[..., source]]
        assert [[word.removeprefix("before ") for word in row] for row in words] == wanted
    assert charts.plain([np.nan, np.inf, 1 / 3]) == [None, None, 0.33333]


@pytest.mark.parametrize("package", ["altair", "PIL.Image"])
def test_missing_packages_are_named(call, sweep, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = call("report", f"--sweep={sweep}", f"--out={tmp_path / 'x.html'}")
    assert status == 2 and package.partition(".")[0] in err and ".[eval]" in err
