"""Files of a sweep for a paper: a table in LaTeX or Markdown, a figure, numbers of single images.

A figure is a metric against bytes, as wide as a column, with the letters of a caption; PDF has its
fonts embedded as TrueType.
"""

import csv
import io
import itertools
import json
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from experiments.evaluation.metrics import METRICS, Metric
from experiments.sweep import tables
from varjax.core.errors import UserError, choose
from varjax.storage import npz

COLUMNS = ("policy", "budget", "planned", "allocated", "seconds")  # beside metrics
WIDTH, HEIGHT, LETTERS = 234, 150, 8  # points, without the legend: 3.25 inches wide
CHARACTER = 4.3  # points, more than the mean letter takes
SMALL = {"line": {"strokeWidth": 1}, "point": {"size": 20}, "rule": {"strokeWidth": 0.8}}
SPECIAL = {c: f"\\{c}" for c in "#$%&_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}"}
SPECIAL |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {"|": r"\textbar{}", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}


def chosen(report: dict, names: Sequence[str] | None) -> list[Metric]:
    """Return the metrics that are asked for; None: all of the sweep. `UserError` for others."""
    rows = tables.rows(report)[1:]
    there = [key for key in METRICS if any(key in row for row in rows)]
    if not there:
        raise UserError("no policy of this sweep could run: there is nothing to show")
    found = [choose("metric of this sweep", name, there) for name in names or there]
    return [METRICS[key] for key in dict.fromkeys(found)]


def table(report: dict, columns: Sequence[str], metrics: Sequence[Metric]) -> list[list[str]]:
    """Return the header and a line for each row that has run, the full cache first. columns: of
    `COLUMNS`; metrics follow them, with units in the header."""
    names = [*COLUMNS[:4], *(m.key for m in metrics), COLUMNS[4]]
    heads = dict(zip(names, tables.header(metrics), strict=False))  # the last one is a note
    units = {m.key: m.shown.partition("} ")[2] for m in metrics}
    for k, u in units.items():
        heads[k] += f" ({u})" * bool(u) + (" ↑" if METRICS[k].better == "higher" else " ↓")
    wanted = list(dict.fromkeys([*(choose("column", n, COLUMNS) for n in columns), *units]))
    lines = [[heads[name] for name in wanted]]
    for row in (row for row in tables.rows(report) if row["status"] == "done"):
        texts = dict(zip(names, tables.cells_as_text(row, metrics), strict=False))
        texts |= {k: texts[k].replace(f" {u}", "", 1) for k, u in units.items() if u}
        lines.append([texts[name] for name in wanted])
    return lines


def latex_text(text: str) -> str:
    """Return a text as LaTeX prints it, a question mark for what it cannot; intervals are small."""
    safe = "".join(SPECIAL.get(c, c) if c.isprintable() else "?" for c in text)
    return re.sub(r" (\[.*\])$", r" {\\scriptsize \1}", safe)


def latex(report: dict, columns: Sequence[str], metrics: Sequence[Metric]) -> str:
    """Return the table as a `tabular` of booktabs, for \\input."""
    lines = table(report, columns, metrics)
    head, full, *rest = (rf"{' & '.join(map(latex_text, line))} \\" for line in lines)
    notes = [tables.outline(report), r"needs \usepackage{booktabs}"]
    notes += [f"{name}: {text}" for name, text in report["definitions"].items()]
    kinds = "".join("l" if name == "policy" else "r" for name in lines[0])
    made = [*(f"% {' '.join(text.split())}" for text in notes), rf"\begin{{tabular}}{{{kinds}}}"]
    made += [r"\toprule", head, r"\midrule", full, r"\midrule", *rest, r"\bottomrule"]
    return "\n".join([*made, r"\end{tabular}", ""])


def markdown(report: dict, columns: Sequence[str], metrics: Sequence[Metric]) -> str:
    """Return the table in Markdown."""
    lines = table(report, columns, metrics)
    head, *rest = ([text.replace("|", "\\|") for text in line] for line in lines)
    return f"{tables.markdown_table(head, rest)}\n"


def per_image(report: dict, folder: pathlib.Path, metrics: Sequence[Metric]) -> str:
    """Return CSV with a line for each number of each image. PSNR of equal images is inf. folder: of
    the sweep. `UserError` if its samples.npz lacks these numbers."""
    out, file, shape = io.StringIO(), folder / "samples.npz", (len(report["settings"]["labels"]),)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("policy", "arguments", "budget", "image", "metric", "value"))
    cells = [cell for cell in report["cells"] if cell["status"] == "done"]
    held = npz.load(file, {f"{cell['samples']}/{m.key}" for cell in cells for m in metrics})
    for cell, m in itertools.product(cells, metrics):
        values = held.get(name := f"{cell['samples']}/{m.key}", np.zeros(0))
        if values.shape != shape or values.dtype.kind not in "fiu":
            raise UserError(f"{file} lacks {name} of {shape[0]} images: run the sweep again")
        asked = cell["policy"], cell["label"].partition(":")[2], cell["budget"]
        writer.writerows((*asked, i, m.key, f"{v:.9g}") for i, v in enumerate(values.tolist()))
    return out.getvalue()


def figure(report: dict, metric: Metric, suffix: str) -> bytes:
    """Return a metric against bytes of an image's cache, as PDF or SVG (`suffix`). `UserError`
    without finite values."""
    import altair as alt
    import vl_convert

    from experiments.report import charts

    rows = [row for row in tables.rows(report)[1:] if row["status"] == "done"]
    rows = [{k: v for k, v in row.items() if k not in METRICS or k == metric.key} for row in rows]
    for row in rows:
        row["allocated_bytes"] /= report["settings"]["batch_size"]
        row["label"] = charts.drawable(row["label"])
    names = charts.labels(rows)
    columns = max(1, min(4, int(WIDTH / (CHARACTER * max(map(len, names)) + 30))))
    legend = alt.Legend(title=None, orient="bottom", columns=columns, labelLimit=WIDTH - 30)
    if not (drawn := charts.fidelity(rows, "an image", legend)):
        raise UserError(f"no policy of this sweep has a finite {metric.key}: choose another metric")
    height = HEIGHT + 12 * -(-len(names) // columns)
    spec = drawn[0].to_dict() | {"width": WIDTH, "height": height, "padding": 1, "config": _style()}
    spec["autosize"] = {"type": "fit", "contains": "padding"}
    spec.pop("title")  # a caption says it
    for layer in spec["layer"]:
        layer["encoding"]["y"]["title"] = metric.name + f" ({metric.unit})" * bool(metric.unit)
        layer["mark"] |= SMALL.get(layer["mark"]["type"], {})
    svg = vl_convert.vegalite_to_svg(json.dumps(spec))
    if suffix == ".pdf":
        return vl_convert.svg_to_pdf(svg)
    sizes = r'width="(\d+)" height="(\d+)"'
    return re.sub(sizes, r'width="\1pt" height="\2pt"', svg, count=1).encode()


def _style() -> dict:
    """Return Vega-Lite's settings: one size of letters, and the page's colours on white. The last
    family of fonts is the one that is embedded where the others are missing."""
    page = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    letters = {"labelFontSize": LETTERS, "titleFontSize": LETTERS, "titleFontWeight": "normal"}
    return {
        "font": "Helvetica, Arial, sans-serif",
        "axis": letters | {"gridColor": "#e4e4e4", "titlePadding": 4},
        "legend": letters | {"symbolSize": 24, "symbolStrokeWidth": 1, "offset": 6},
        "range": {"category": re.findall(r"--s\d: (#\w+)", page)[:7]},
        "view": {"stroke": None},
    }
