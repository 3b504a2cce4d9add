"""`experiments.report --leaderboard`: groups that can be compared, what is refused, the page."""

import html
import json
import re
import shutil
from math import nan

import pytest

from tests.experiments import made_up_sweep
from tests.experiments.html_page import Page

for package in ("altair", "jinja2", "vl_convert", "PIL"):
    pytest.importorskip(package)

NAMES = ("a", "b", "c")


@pytest.fixture
def sweeps(tmp_path):
    """Three sweeps: b has other pictures than a, c was run on another device."""
    for name in NAMES:
        made_up_sweep.write_sweep(tmp_path / name)
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


def sections(page):
    """{heading: runs of the rows below it}."""
    parts = re.findall(r"<section.*?<h2>(.*?)</h2>(.*?)</section>", page, re.DOTALL)
    rows = {name: re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)[1:] for name, text in parts}
    cells = {n: [re.findall("<td>(.*?)</td>", r, re.DOTALL) for r in of] for n, of in rows.items()}
    return {n: [[text.strip() for text in row] for row in of] for n, of in cells.items()}


def test_groups(call, sweeps, tmp_path):
    page = page_of(call, tmp_path / "page.html", *sweeps)
    (first, comparable), (_, other) = sections(page).items()
    assert first == "1: made &lt;up&gt;" and "kept apart: other pictures" in page
    assert {row[-1] for row in comparable} == {str(sweeps[0]), str(sweeps[2])}
    assert {row[-1] for row in other} == {str(sweeps[1])}
    assert len(comparable) == 8 and "22.00 dB" in page  # three cells and the full cache, twice
    assert "swa, cpu: cpu" in page and "swa, gpu: other" in page  # a line for each device
    assert Page(page).unbalanced == [] and "http-equiv" in page
    again = page_of(call, tmp_path / "again.html", f"{tmp_path}/*")
    assert again == page


def put(value, *path):
    """A change that sets the last of the keys `path`."""

    def change_in(folder):
        def how(report):
            for key in path[:-1]:
                report = report[key]
            report[path[-1]] = value

        change(folder, how)

    return change_in


def twice(folder):
    text = (folder / "sweep.json").read_text()
    (folder / "sweep.json").write_text(text.replace('"seed": 7', '"seed": 0, "seed": 7'))


UNUSABLE = [
    (shutil.rmtree, "no finished sweep"),
    (put(99, "format_version"), "version"),
    (twice, "key 'seed' is there twice"),
    (put(nan, "cells", 0, "fidelity", "psnr"), "cells[0].fidelity.psnr: "),
    (put(0, "settings", "batch_size"), "settings.batch_size: "),
]


@pytest.mark.parametrize(("case", "reason"), UNUSABLE)
def test_one_that_cannot_be_used_is_left_out(call, sweeps, tmp_path, case, reason):
    """The page says why, as stderr does, and shows the others; no others: an error."""
    case(sweeps[1])
    out = tmp_path / "x.html"
    status, _, err = call("report", f"--leaderboard={','.join(map(str, sweeps))}", f"--out={out}")
    assert status == 0 and err.count("left out: ") == 1 and reason in err and "--sweep" not in err
    page = html.unescape(out.read_text(encoding="utf-8"))
    assert err.strip() in page
    assert {row[-1] for rows in sections(page).values() for row in rows} == {
        str(sweeps[0]),
        str(sweeps[2]),
    }
    status, _, err = call("report", f"--leaderboard={sweeps[1]}", f"--out={tmp_path / 'y.html'}")
    assert status == 2 and "no sweep can be used" in err and reason in err
    assert not (tmp_path / "y.html").exists()


def test_wrong_flags(call, sweeps, tmp_path):
    for flags in ((), (f"--sweep={sweeps[0]}", f"--leaderboard={sweeps[1]}")):
        status, _, err = call("report", *flags, f"--out={tmp_path / 'x.html'}")
        assert status == 2 and "give either --sweep=FOLDER or --leaderboard" in err
    status, _, err = call("report", f"--leaderboard={tmp_path}/x*", f"--out={tmp_path / 'x.html'}")
    assert status == 2 and "no folder of a sweep has such a name" in err
