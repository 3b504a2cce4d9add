"""`experiments.report --out=FILE` for papers: tables, figures, numbers of single images."""

import csv
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from experiments.report import paper

for package in ("altair", "jsonschema", "vl_convert"):
    pytest.importorskip(package)

HOSTILE = r"a_1%&{x}\$#~^<|>"


@pytest.fixture
def measured(sweep):
    """The sweep with numbers of single images, an interval and a policy with special characters."""
    with np.load(sweep / "samples.npz") as archive:
        arrays = dict(archive)
    content = json.loads((sweep / "sweep.json").read_text())
    for i, cell in enumerate(content["cells"][:3]):
        cell["fidelity"] |= {"psnr_low": 20.5, "psnr_high": 23.456}
        arrays |= {f"{cell['samples']}/psnr": np.array([20.0 + i, np.inf], np.float32)}
        arrays |= {f"{cell['samples']}/kl": np.array([0.125, 0.0])}
    content["cells"][0]["label"] = f"swa:{HOSTILE}"
    content["settings"]["model"] = "two\nlines"
    (sweep / "sweep.json").write_text(json.dumps(content))
    np.savez(sweep / "samples.npz", **arrays)
    return sweep


def written(call, sweep, name, *flags):
    out = sweep.parent / name
    status, _, err = call("report", f"--sweep={sweep}", f"--out={out}", *flags)
    assert status == 0 and "left out: streaming at 0.2: the budget" in err, err
    return out.read_bytes()


def test_latex_is_well_formed(call, measured):
    """Braces close, lines have as many cells as columns, and every special character is escaped."""
    text = written(call, measured, "table.tex", "--metrics=kl,psnr", "--columns=policy").decode()
    lines = [line for line in text.splitlines() if not line.startswith("% ")]
    assert lines[0] == r"\begin{tabular}{lrr}" and lines[-1] == r"\end{tabular}"
    rules = [line for line in lines if not line.endswith(r" \\")][1:-1]
    assert rules == [r"\toprule", r"\midrule", r"\midrule", r"\bottomrule"]
    head, full, *rest = (line.removesuffix(r" \\") for line in lines if line.endswith(r" \\"))
    assert head == r"policy & KL (nats) $\downarrow$ & PSNR to full (dB) $\uparrow$"
    assert full == "full &  & " and rest[1] == r"swa & 0.05 & 22.00 {\scriptsize [20.50, 23.46]}"
    printed = r"swa:a\_1\%\&\{x\}\textbackslash{}\$\#\textasciitilde{}\textasciicircum{}"
    printed += r"\textless{}\textbar{}\textgreater{}"
    assert rest[0].startswith(f"{printed} & 0.1 & ")
    for line in (head, full, *rest):
        plain = re.sub(r"\\[#$%&_{}]", "", line)
        assert plain.count("&") == 2 and plain.count("{") == plain.count("}")
        assert not re.search(r"[#%~^_<>|]", plain) and plain.count("$") % 2 == 0
    table = written(call, measured, "table.md").decode().splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1 and len(table) == 6


def test_figures_have_the_size_and_the_letters_of_a_paper(call, measured):
    drawn = ET.fromstring(written(call, measured, "figure.svg", "--metrics=kl"))
    assert (drawn.get("width"), drawn.get("viewBox")) == ("234pt", f"0 0 234 {paper.HEIGHT + 24}")
    texts = [e for e in drawn.iter("{http://www.w3.org/2000/svg}text") if e.text]
    assert "KL (nats per token)" in {text.text for text in texts}
    assert {text.get("font-size") for text in texts} == {"8px"}
    made = written(call, measured, "figure.pdf")
    assert made.startswith(b"%PDF") and re.search(rb"/MediaBox *\[0 0 234 174\]", made)
    assert re.search(rb"/FontFile2 ", made) and b"/CIDFontType2" in made


def test_numbers_of_single_images(call, measured):
    text = written(call, measured, "per_image.csv", "--metrics=psnr,kl").decode()
    head, *rows = csv.reader(text.splitlines())
    assert head == "policy arguments budget image metric value".split() and len(rows) == 12
    assert rows[1] == ["swa", HOSTILE, "0.2", "1", "psnr", "inf"]
    assert rows[2] == ["swa", HOSTILE, "0.2", "0", "kl", "0.125"]
    assert rows[8] == ["streaming", "", "0.5", "0", "psnr", "22"]


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("p.csv", "--metrics=ssim", "lacks c1/ssim of 2 images: run the sweep again"),
        ("t.tex", "--metrics=lpips", "unknown metric of this sweep 'lpips': choose one of psnr"),
        ("t.md", "--columns=kv", "unknown column 'kv': choose one of policy"),
    ],
)
def test_refused(call, measured, name, flag, message):
    out = measured.parent / name
    status, _, err = call("report", f"--sweep={measured}", f"--out={out}", flag)
    assert status == 2 and message in err and not out.exists()
