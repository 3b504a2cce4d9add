"""Files of a sweep for a paper: a table in LaTeX or Markdown, a figure, numbers of single images.

A table is a `tabular` of booktabs for `\\input`. A figure is a metric against bytes, as wide as a
column, in the paper's size of letters; PDF has its fonts embedded as TrueType.
"""

import csv
import io
import json
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.evaluation.metrics import METRICS, Metric
from experiments.sweep import tables
from varjax.core.errors import UserError, choose
from varjax.storage import npz

COLUMNS = ("policy", "budget", "planned", "allocated", "seconds")  # beside metrics
USUAL = "policy,budget,allocated"
WIDTH, HEIGHT, LETTERS = 234, 150, 8  # points, without the legend: 3.25 inches wide
# the last family is the one that is embedded where the others are missing
FONT = "Helvetica, Arial, sans-serif"
CHARACTER = 4.3  # points that a letter takes in the mean, more than it does
SMALL = {"line": {"strokeWidth": 1}, "point": {"size": 20}, "rule": {"strokeWidth": 0.8}}
SPECIAL = {c: f"\\{c}" for c in "#$%&_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}"}
SPECIAL |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {"|": r"\textbar{}", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}
LONG = ("policy", "arguments", "budget", "image", "metric", "value")  # columns of per_image.csv


def chosen(report: dict, names: Sequence[str] | None) -> list[Metric]:
    """Return the metrics that are asked for; None: all that the sweep has. `UserError` for others
    than it has."""
    rows = tables.rows(report)
    there = [key for key in METRICS if any(key in row for row in rows[1:])]
    if not there:
        raise UserError("no policy of this sweep could run: there is nothing to show")
    for name in names or ():
        choose("metric of this sweep", name, there)
    return [METRICS[key] for key in dict.fromkeys(names or there)]


def table(report: dict, columns: Sequence[str], metrics: Sequence[Metric]) -> list[list[str]]:
    """Return the header and a line for each row that has run, the full cache first. columns: of
    `COLUMNS`; metrics follow them, with units in the header."""
    names = ["policy", "budget", "planned", "allocated", *(m.key for m in metrics), "seconds"]
    units = {m.key: m.shown.partition("} ")[2] for m in metrics}
    heads = dict(zip(names, tables.header(metrics), strict=False))  # the last one is a note
    for metric in metrics:
        unit = f" ({units[metric.key]})" if units[metric.key] else ""
        heads[metric.key] += f"{unit} {'↑' if metric.better == 'higher' else '↓'}"
    wanted = list(dict.fromkeys([*columns, *units]))
    lines = [[heads[name] for name in wanted]]
    for row in tables.rows(report):
        if row["status"] == "done":
            texts = dict(zip(names, tables.cells_as_text(row, metrics), strict=False))
            texts |= {k: texts[k].replace(f" {u}", "", 1) for k, u in units.items() if u}
            lines.append([texts[name] for name in wanted])
    return lines


def latex_text(text: str) -> str:
    """Return a text as LaTeX prints it; what it cannot print is a question mark."""
    return "".join(SPECIAL.get(c, c) if c.isprintable() else "?" for c in text)


def latex(report: dict, columns: Sequence[str], metrics: Sequence[Metric]) -> str:
    """Return the table as a `tabular`. Intervals are small, in brackets."""
    head, full, *rest = (
        [re.sub(r" (\[.*\])$", r" {\\scriptsize \1}", latex_text(text)) for text in line]
        for line in table(report, columns, metrics)
    )
    said = [tables.outline(report), r"needs \usepackage{booktabs}"]
    said += [f"{name}: {text}" for name, text in report["definitions"].items()]
    lines = [f"% {' '.join(text.split())}" for text in said]
    kinds = ["l" if name == "policy" else "r" for name in dict.fromkeys(columns)]
    lines.append(rf"\begin{{tabular}}{{{''.join(kinds)}{'r' * (len(head) - len(kinds))}}}")
    parts = [r"\toprule", head, r"\midrule", full, r"\midrule", *rest, r"\bottomrule"]
    lines += [part if isinstance(part, str) else rf"{' & '.join(part)} \\" for part in parts]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def markdown(report: dict, columns: Sequence[str], metrics: Sequence[Metric]) -> str:
    """Return the table in Markdown."""
    head, *lines = (
        [text.replace("|", "\\|") for text in line] for line in table(report, columns, metrics)
    )
    return f"{tables.markdown_table(head, lines)}\n"


def per_image(report: dict, folder: pathlib.Path, metrics: Sequence[Metric]) -> str:
    """Return CSV with a line for each number of each image: `LONG`. PSNR of equal images is inf.
    folder: of the sweep. `UserError` if its samples.npz lacks these numbers."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(LONG)
    writer.writerows(_long(report, folder / "samples.npz", metrics))
    return out.getvalue()


def _long(report: dict, file: pathlib.Path, metrics: Sequence[Metric]) -> Iterator[tuple]:
    cells = [cell for cell in report["cells"] if cell["status"] == "done"]
    names = {f"{cell['samples']}/{metric.key}" for cell in cells for metric in metrics}
    held, shape = npz.load(file, names), (len(report["settings"]["labels"]),)
    for cell in cells:
        arguments = cell["label"].partition(":")[2]
        for metric in metrics:
            name = f"{cell['samples']}/{metric.key}"
            values = held.get(name, np.zeros(0))
            if values.shape != shape or values.dtype.kind not in "fiu":
                raise UserError(
                    f"{file} has no numbers {name} of {shape[0]} images: run the sweep again"
                )
            for number, value in enumerate(values.tolist()):
                yield cell["policy"], arguments, cell["budget"], number, metric.key, f"{value:.9g}"


def figure(report: dict, metric: Metric, suffix: str) -> bytes:
    """Return a metric against bytes of an image's cache, as PDF or SVG (`suffix`)."""
    import altair as alt
    import vl_convert

    from experiments.report import charts

    size = report["settings"]["batch_size"]
    rows = [row for row in tables.rows(report)[1:] if row["status"] == "done"]
    for row in rows:
        row["allocated_bytes"] /= size
        row["label"] = charts.drawable(row["label"])
    longest = max(len(row["label"]) for row in rows)
    columns = max(1, min(4, int(WIDTH / (CHARACTER * longest + 30))))
    legend = alt.Legend(title=None, orient="bottom", columns=columns, labelLimit=WIDTH - 30)
    (chart,) = charts.fidelity(rows, "an image", legend, (metric.key,))
    height = HEIGHT + 12 * -(-len(charts.labels(rows)) // columns)
    spec = chart.to_dict() | {"width": WIDTH, "height": height, "padding": 1, "config": style()}
    spec["autosize"] = {"type": "fit", "contains": "padding"}
    spec.pop("title")  # a caption says it
    unit = f" ({metric.unit})" if metric.unit else ""
    for layer in spec["layer"]:
        layer["encoding"]["y"]["title"] = f"{metric.name}{unit}"
        layer["mark"] |= SMALL.get(layer["mark"]["type"], {})
    drawn = vl_convert.vegalite_to_svg(json.dumps(spec))
    if suffix == ".pdf":
        return vl_convert.svg_to_pdf(drawn)
    sizes = r'width="(\d+)" height="(\d+)"'
    return re.sub(sizes, r'width="\1pt" height="\2pt"', drawn, count=1).encode()


def style() -> dict:
    """Return Vega-Lite's settings of a figure: one size of letters, thin lines, the page's colours
    on white."""
    page = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    colours = re.findall(r"--s\d: (#\w+)", page)[:7]
    letters = {"labelFontSize": LETTERS, "titleFontSize": LETTERS, "titleFontWeight": "normal"}
    return {
        "font": FONT,
        "axis": letters | {"gridColor": "#e4e4e4", "titlePadding": 4},
        "legend": letters | {"symbolSize": 24, "symbolStrokeWidth": 1, "offset": 6},
        "range": {"category": colours},
        "view": {"stroke": None},
    }
