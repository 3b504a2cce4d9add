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

HOSTILE = r"a_1%&{x}\$#~^|"
PRINTED = r"a\_1\%\&\{x\}\textbackslash{}\$\#\textasciitilde{}\textasciicircum{}\textbar{}"


@pytest.fixture
def written(call, sweep):
    """written(name, *flags): the file that a report writes of a sweep with numbers of single
    images, an interval and a policy with special characters."""
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

    def invoke(name, *flags):
        out = sweep.parent / name
        status, _, err = call("report", f"--sweep={sweep}", f"--out={out}", *flags)
        assert out.exists() == (status == 0) and "left out: streaming at 0.2: the budget" in err
        return out.read_bytes() if status == 0 else err

    return invoke


def test_tables_are_well_formed(written):
    """Lines have as many cells as columns, and every special character is escaped."""
    text = written("table.tex", "--metrics=kl,psnr", "--columns=policy").decode()
    begin, top, head, _, full, _, first, second, _, bottom, end = (
        line for line in text.splitlines() if not line.startswith("% ")
    )
    assert (begin, end) == (r"\begin{tabular}{lrr}", r"\end{tabular}")
    assert (top, bottom) == (r"\toprule", r"\bottomrule") and text.count("\n\\midrule\n") == 2
    assert head == r"policy & KL (nats) $\downarrow$ & PSNR to full (dB) $\uparrow$ \\"
    assert full == r"full &  &  \\" and first.startswith(rf"swa:{PRINTED} & 0.1 & 21.00 {{")
    assert second == r"swa & 0.05 & 22.00 {\scriptsize [20.50, 23.46]} \\"
    lines = written("table.md").decode().splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {8} and len(lines) == 6


def test_figures_have_the_size_and_the_letters_of_a_paper(written):
    drawn = ET.fromstring(written("figure.svg", "--metrics=kl"))
    assert (drawn.get("width"), drawn.get("viewBox")) == ("234pt", f"0 0 234 {paper.HEIGHT + 24}")
    texts = [e for e in drawn.iter("{http://www.w3.org/2000/svg}text") if e.text]
    assert "KL (nats per token)" in {text.text for text in texts}
    assert {text.get("font-size") for text in texts} == {"8px"}
    made = written("figure.pdf")
    assert made.startswith(b"%PDF") and re.search(rb"/MediaBox *\[0 0 234 174\]", made)
    assert b"/FontFile2 " in made and b"/CIDFontType2" in made


def test_numbers_of_single_images(written):
    head, *rows = csv.reader(written("per_image.csv", "--metrics=psnr,kl").decode().splitlines())
    assert head == "policy arguments budget image metric value".split() and len(rows) == 12
    assert rows[1] == ["swa", HOSTILE, "0.2", "1", "psnr", "inf"]
    assert rows[2][3:] == ["0", "kl", "0.125"]
    assert rows[8] == ["streaming", "", "0.5", "0", "psnr", "22"]


def test_what_is_not_there(written):
    said = written("p.csv", "--metrics=ssim")
    assert "samples.npz lacks c1/ssim of 2 images: run the sweep again" in said
    said = written("t.tex", "--metrics=lpips")
    assert "unknown metric of this sweep 'lpips': choose one of psnr" in said
    assert "unknown column 'kv': choose one of policy" in written("t.md", "--columns=kv")
