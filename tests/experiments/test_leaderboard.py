"""`experiments.report --leaderboard`: groups that can be compared, what is refused, the page."""

import json
import re
import shutil
import subprocess

import pytest

from tests.experiments import made_up_sweep

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NAMES = ("a", "b", "c")


@pytest.fixture
def sweeps(tmp_path):
    """Three sweeps: b has other pictures than a, c was run on another device."""
    for name in NAMES:
        made_up_sweep.write(tmp_path / name)
    change(tmp_path / "b", lambda report: report["settings"].update(seed=7))
    change(tmp_path / "c", lambda report: report.update(device="gpu: other"))
    return [tmp_path / name for name in NAMES]


def change(folder, how):
    path = folder / "sweep.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    how(content)
    path.write_text(json.dumps(content), "utf-8")


def page_of(call, out, *folders):
    given = ",".join(map(str, folders))
    status, text, err = call("report", f"--leaderboard={given}", f"--out={out}")
    assert status == 0 and "written to" in text, err
    return out.read_text(encoding="utf-8")


def test_groups(call, sweeps, tmp_path):
    page = page_of(call, tmp_path / "page.html", *sweeps)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    groups = {row["group"] for row in data["rows"]}
    assert len(groups) == 2 and "kept apart: other pictures" in page
    by_run = {name: {r["group"] for r in data["rows"] if r["run"].endswith(name)} for name in NAMES}
    assert by_run["a"] == by_run["c"] != by_run["b"]
    row = next(r for r in data["rows"] if r["policy"] == "swa" and r["budget"] == 0.5)
    assert row["psnr"] == 22 and row["speed"] == 10 and row["bytes"] > 0 and row["fid"] is None
    assert list(data["scores"]) == ["psnr", "kl", "ssim", "token_agreement"]
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    again = page_of(call, tmp_path / "again.html", f"{tmp_path}/*")
    assert again == page


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_draws_it(call, sweeps, tmp_path):
    page_of(call, tmp_path / "page.html", *sweeps)
    flags = "--headless --no-sandbox --disable-gpu --dump-dom --virtual-time-budget=2000".split()
    address = (tmp_path / "page.html").as_uri()
    run = subprocess.run([CHROMIUM, *flags, address], capture_output=True, text=True, timeout=120)
    body = re.search(r'<tbody id="body">(.*?)</tbody>', run.stdout, re.DOTALL)[1]
    assert body.count("<tr>") == 8  # the first group: two sweeps of three cells and the full cache
    assert run.stdout.count("<circle") == 6 and "8 of 12 rows" in run.stdout


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "--leaderboard="),
        (lambda folder: change(folder, lambda r: r.update(format_version=99)), "version"),
        (lambda folder: (folder / "sweep.json").write_text("{"), "damaged"),
        (
            lambda folder: change(folder, lambda r: r["cells"][0]["kv"].update(fraction=0.01)),
            "the file was edited",
        ),
    ],
)
def test_what_is_refused(call, sweeps, tmp_path, case, message):
    case(sweeps[1])
    given = ",".join(map(str, sweeps))
    status, _, err = call("report", f"--leaderboard={given}", f"--out={tmp_path / 'x.html'}")
    assert status == 2 and message in err and err.count("error:") == 1 and "--sweep" not in err
    assert not (tmp_path / "x.html").exists()


def test_wrong_flags(call, sweeps, tmp_path):
    for flags in ((), (f"--sweep={sweeps[0]}", f"--leaderboard={sweeps[1]}")):
        status, _, err = call("report", *flags, f"--out={tmp_path / 'x.html'}")
        assert status == 2 and "give either --sweep=FOLDER or --leaderboard" in err
    status, _, err = call("report", f"--leaderboard={tmp_path}/x*", f"--out={tmp_path / 'x.html'}")
    assert status == 2 and "no folder of a sweep has such a name" in err
