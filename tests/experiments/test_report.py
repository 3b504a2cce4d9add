"""`experiments.report` from a small made-up sweep: sections, one file, a browser that agrees."""

import base64
import html.parser
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from experiments.report import calibration_figures, png, svg
from experiments.report import command as report_module
from tests.experiments.made_up_sweep import GEOMETRY
from varjax import calibration as measured
from varjax.calibration import Calibration

SECTIONS = "table fidelity pictures bytes density discrepancy patterns pruning stability".split()
VOID = {"meta", "link", "img", "input", "br"}
BROWSER = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--enable-logging=stderr --v=0 --virtual-time-budget=3000 --dump-dom"
).split()


@pytest.fixture
def calibration(tmp_path):
    """A file with everything that can be drawn."""
    rng = np.random.default_rng(1)
    layers, heads, scales = GEOMETRY.num_layers, GEOMETRY.num_heads, GEOMETRY.schedule.num_scales
    beta = np.tril(rng.uniform(0.1, 1, (layers, heads, scales, scales)))
    path = tmp_path / "calibration.json"
    made = Calibration(
        schedule=GEOMETRY.schedule,
        num_layers=layers,
        num_heads=heads,
        num_samples=2,
        beta=beta / beta.sum(-1, keepdims=True),
        key_discrepancy=rng.uniform(size=(layers, scales)),
        query_variance=rng.uniform(size=(layers, heads)),
        selectivity=rng.uniform(size=(layers, scales)),
        pattern_heads=np.array([[0, 1], [3, 2]], np.int32),
        patterns=rng.uniform(size=(2, 4, 15)),
        pattern_scale=3,
        pattern_edges=np.arange(0, 32, 2, dtype=np.int32)[:16],
        rank_dispersion=rng.uniform(size=3),
    )
    measured.save(made, path)
    return path


class Page(html.parser.HTMLParser):
    """Ids, resources and unbalanced elements of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.resources, self.open, self.unbalanced = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.resources += [v for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.resources += [v for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)


def check_self_contained(text):
    page = Page(text)
    assert not page.unbalanced and not page.open
    assert len(set(page.ids)) == len(page.ids) and set(SECTIONS) <= set(page.ids)
    assert all(r.startswith(("data:", "#")) for r in page.resources), page.resources
    assert not re.search(r"https?://|@import|url\(", text)


def test_everything_is_there_in_one_file(call, sweep, calibration, tmp_path):
    out = tmp_path / "report.html"
    flags = (f"--sweep={sweep}", f"--out={out}")
    status, text, err = call("report", *flags, f"--calibration={calibration}")
    assert status == 0 and "report.html" in text, err
    page = out.read_text(encoding="utf-8")
    check_self_contained(page)
    assert 'class="missing">There' not in page
    assert "made &lt;up&gt;" in page and "<b>too</b>" not in page and "&lt;b&gt;too" in page
    for source in ("AMS-KV, Figure 4", "AMS-KV, Figure 6", *(f"HeatKV, Figure {i}" for i in "346")):
        assert source in page
    data = json.loads(re.search(r'id="picture-data">(.*?)</script>', page)[1])
    assert [row["label"] for row in data["rows"]].count("swa") == 2
    assert data["rows"][0]["numbers"][1].startswith("identical")
    swa = np.load(sweep / "samples.npz")["c1"]
    pillow = pytest.importorskip("PIL.Image")
    encoded = base64.b64decode(data["rows"][0]["images"][1].partition(",")[2])
    np.testing.assert_array_equal(np.asarray(pillow.open(io.BytesIO(encoded))), swa[1])

    assert call("report", *flags)[0] == 2  # the file exists
    assert call("report", *flags, "--overwrite", "--images=1")[0] == 0
    page = out.read_text(encoding="utf-8")
    check_self_contained(page)
    assert page.count("python -m experiments.calibrate") == 5
    assert "--stability=10" in page and "1 more samples" in page
    shutil.copy(calibration, sweep / "calibration.json")
    assert call("report", *flags, "--overwrite")[0] == 0  # the sweep's own calibration
    assert "experiments.calibrate" not in out.read_text(encoding="utf-8")


def test_a_browser_runs_it_without_errors(call, sweep, calibration, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs chromium, which is not installed")
    out = tmp_path / "report.html"
    flags = (f"--sweep={sweep}", f"--out={out}", f"--calibration={calibration}")
    assert call("report", *flags)[0] == 0
    # what a user does: a slider, menus, a heading, a legend; then the page is read back
    steps = """<script>
      const fire = (e, type) => e.dispatchEvent(new Event(type, { bubbles: true }));
      const slider = document.querySelector("input[type=range]");
      slider.value = "20"; fire(slider, "input");
      for (const menu of document.querySelectorAll("select"))
        for (const option of [...menu.options]) { menu.value = option.value; fire(menu, "change"); }
      document.querySelectorAll("th button")[4].click();
      document.querySelector("[data-highlight]").click();
      document.documentElement.dataset.wiped =
        document.querySelector(".tiles").style.getPropertyValue("--wipe");
    </script></body>"""
    text = out.read_text(encoding="utf-8").replace("</body>", steps)
    out.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [browser, *BROWSER, f"--user-data-dir={tmp_path / 'profile'}", out.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
    )
    root = re.search(r"<html[^>]*>", done.stdout)[0]
    assert "CONSOLE" not in done.stderr, done.stderr
    assert 'data-errors="0"' in root and 'data-ready="1"' in root and 'data-wiped="20%"' in root
    assert 'aria-sort="ascending"' in done.stdout and 'class="series chosen"' in done.stdout
    assert "needs a calibration" in done.stdout  # the last choice is the policy that was skipped


def test_large_pictures_are_left_out():
    samples = {name: np.zeros((8, 512, 512, 3), np.uint8) for name in ("labels", *range(16))}
    samples["full"] = samples.pop(0)
    assert report_module.number_of_images(samples) == 4


# --- figures ---


def test_attention_density_is_the_papers():
    """d[i <- j] by summing an attention matrix."""
    rng = np.random.default_rng(0)
    tokens = GEOMETRY.schedule.tokens
    attention = rng.dirichlet(np.ones(sum(tokens)), size=(3, 4, tokens[-1]))
    beta = np.zeros((3, 4, 5, 5))
    beta[..., -1, :] = np.add.reduceat(attention.mean(-2), GEOMETRY.schedule.starts, axis=-1)
    found = calibration_figures.attention_density(beta, tokens)
    for i, (start, end) in enumerate(
        zip(GEOMETRY.schedule.starts, GEOMETRY.schedule.ends, strict=True)
    ):
        wanted = attention[..., start:end].sum((-2, -1)) / tokens[i]
        np.testing.assert_allclose(found[..., i], wanted)


def test_axes():
    assert [text for _, text in svg.linear(0, 1, "x").ticks] == "0 0.2 0.4 0.6 0.8 1".split()
    assert svg.linear(3, 3, "x").part(3) == pytest.approx(0.5)
    assert [text for _, text in svg.logarithmic(0.5, 600, "x").ticks] == "1 10 100".split()
    axis = svg.logarithmic(1, 100, "x")
    assert axis.part(10) == pytest.approx(0.5)
    assert svg.counted(["a", "b"], "x", down=True).part(0.5) == 0.75


def test_pictures_and_colours():
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 4), np.uint8)
    decoded = np.asarray(pillow.open(io.BytesIO(png.encode(pixels))))
    np.testing.assert_array_equal(decoded, pixels)
    ends = png.colours(np.array([0.0, 1.0, np.nan]))
    assert ends.tolist() == [[0, 32, 76, 255], [255, 233, 69, 255], [0, 32, 76, 0]]
