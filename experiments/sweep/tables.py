"""What a sweep writes: one table as CSV and Markdown, all numbers as JSON, samples, a plot."""

import csv
import io
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.generation import environment
from experiments.sweep.plan import Cell, Sweep
from varjax import metrics
from varjax.errors import MissingExtra, require
from varjax.io.json_text import json_text
from varjax.metrics import METRICS
from varjax.storage.atomic import write_text

FORMAT_VERSION = 1
FULL = "full"
CALIBRATION_COPY = "calibration.json"
# Okabe and Ito's colours, told apart by the colour-blind (yellow left out: too light for lines)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
LONGEST_LABEL = 100  # characters of a policy's label in the plot
DEFINITIONS = {
    "planned, allocated": "bytes of the buffer that holds keys and values of one batch, as planned "
    "and as read off the compiled program; the percentage is of the full cache",
    **metrics.definitions(),
    "s/image": "median over at least two runs after the first, pixels included; the program also "
    "returns its logits",
}
CSV_FIELDS = (
    *"label policy budget status dense_bytes planned_bytes allocated_bytes fraction".split(),
    "peak_live_fraction",
    *(f"{key}{end}" for key, m in METRICS.items() for end in ("", "_std")[: 1 + m.per_image]),
    *"identical_images steady_s_per_image compile_s note".split(),
)
HEADER = (
    "policy",
    "budget",
    "KV planned",
    "KV allocated",
    *(metric.column for metric in METRICS.values()),
    "s/image",
    "note",
)


# --- content ---


def content(sweep: Sweep, results: dict[str, dict]) -> dict:
    """Everything of sweep.json. `results`: what is stored of each cell, by its key."""
    g = sweep.model.geometry
    shown = sweep.condition.captions or [f"class {i}" for i in sweep.condition.numbers]
    return {
        "format_version": FORMAT_VERSION,
        "settings": sweep.describe(),
        "geometry": {
            "schedule": str(g.schedule),
            **{n: getattr(g, n) for n in ("num_layers", "num_heads", "head_dim", "rows_per_image")},
        },
        **environment(),
        "sample_names": shown[: sweep.samples],
        "definitions": DEFINITIONS,
        "reference": results[sweep.full.key]["row"] | {"status": "done", "samples": FULL},
        "cells": [_cell_content(cell, results) for cell in sweep.cells],
    }


def _cell_content(cell: Cell, results: dict[str, dict]) -> dict:
    asked = {"label": cell.label, "policy": cell.name, "budget": cell.budget}
    if cell.plan is None:
        status = "skipped" if cell.budget is None else "infeasible"
        return asked | {"status": status, "reason": cell.reason}
    return results[cell.key]["row"] | asked | {"status": "done", "samples": cell.key}


def samples(sweep: Sweep, results: dict[str, dict]) -> dict[str, np.ndarray]:
    """Arrays of samples.npz: `labels` int [n], and uint8 [n, H, W, 3] for `full` and each cell."""
    cells = {FULL: sweep.full, **{cell.key: cell for cell in sweep.cells if cell.plan}}
    labels = sweep.condition.numbers[: sweep.samples].astype(np.int64)
    return {"labels": labels, **{n: results[cell.key]["samples"] for n, cell in cells.items()}}


# --- tables ---


def rows(report: dict) -> list[dict]:
    """One flat dict per row of the table, the full cache first; what is not known is absent."""
    found = []
    for cell in (report["reference"], *report["cells"]):
        row = {k: cell[k] for k in ("label", "policy", "budget", "status")}
        for part in ("kv", "fidelity", "time"):
            row |= cell.get(part, {})
        found.append(row | {"note": cell.get("reason", "")})
    return found


def csv_text(report: dict) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_FIELDS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(report))
    return out.getvalue()


def cells_as_text(row: dict) -> list[str]:
    """A row of the table in the words of `HEADER`; what is not known is empty."""
    budget = "" if row["budget"] is None else f"{row['budget']:g}"
    planned = allocated = seconds = ""
    note = f"{row['status']}: {row['note']}"
    if row["status"] == "done":
        planned, allocated = (
            f"{row[n] / 2**20:.2f} MiB" for n in ("planned_bytes", "allocated_bytes")
        )
        allocated += f" ({row['fraction']:.1%})"
        seconds, note = f"{row['steady_s_per_image']:.3f}", row["note"]
    close = [m.show(row[key]) if key in row else "" for key, m in METRICS.items()]
    return [row["label"], budget, planned, allocated, *close, seconds, note]


def markdown_rows(report: dict) -> str:
    """The table alone."""
    lines = [HEADER, ["---"] * len(HEADER)]
    for row in rows(report):
        label, *rest, note = cells_as_text(row)
        lines.append([f"`{label}`", *rest, note.replace("|", "\\|").replace("\n", " ")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(report: dict) -> str:
    """sweep.md: what was run, the table, what its columns mean."""
    s, versions = report["settings"], report["versions"]
    head = (
        f"{s['model']}: {len(s['labels'])} images, seed {s['seed']}, batches of "
        f"{s['batch_size']}, {s['dtype']}, cache in {s['kv_dtype']}, {report['device']}, "
        f"varjax {versions['varjax']}, jax {versions['jax']}; calibration "
        f"{(s['calibration'] or 'none')[:16]}"
    )
    notes = [f"- {name}: {text}." for name, text in report["definitions"].items()]
    return "\n".join(["# Sweep", "", head, "", markdown_rows(report), "", *notes]) + "\n"


# --- files ---


def write(
    out: pathlib.Path,
    report: dict,
    images: dict[str, np.ndarray],
    calibration: bytes | None = None,
) -> str | None:
    """Fill the folder of a finished sweep; returns why the plot is missing, if it is."""
    if calibration is not None:
        (out / CALIBRATION_COPY).write_bytes(calibration)
    write_text(out / "sweep.json", json_text(report))
    write_text(out / "sweep.csv", csv_text(report))
    write_text(out / "sweep.md", markdown(report))
    np.savez(out / "samples.npz", **images)
    try:
        plot(out / "fidelity.png", rows(report))
    except MissingExtra as error:
        return str(error)
    return None


def curves(table: Sequence[dict], metric: str) -> dict[str, list[tuple[float, float]]]:
    """{label: [(allocated bytes, value), ...]} by ascending bytes, infinite values left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in table:
        if math.isfinite(value := float(row.get(metric, "nan"))):
            found.setdefault(row["label"], []).append((float(row["allocated_bytes"]), value))
    return {label: sorted(points) for label, points in found.items()}


def plot(path: pathlib.Path, table: Sequence[dict]) -> None:
    """Fidelity against bytes, a panel per metric. `MissingExtra` without matplotlib."""
    need = {"extra": "eval", "purpose": "plotting"}
    require("matplotlib", **need).use("Agg")
    pyplot = require("matplotlib.pyplot", **need)
    rows = -(-len(METRICS) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 4 * rows), layout="constrained")
    for metric, axis in zip(METRICS.values(), axes.flat, strict=False):
        for number, (label, points) in enumerate(curves(table, metric.key).items()):
            sizes, values = zip(*points, strict=True)
            sizes = np.array(sizes) / 2**20
            style = {"marker": "osD^vP*X"[number % 8], "ls": ("-", "--", ":")[number // 8 % 3]}
            style["color"] = COLOURS[number % len(COLOURS)]
            axis.plot(sizes, values, label=_drawn(label), **style)
        axis.set_xlabel("KV cache of one batch, MiB")
        axis.set_title(f"{metric.title} ({metric.better} is better)", fontsize="medium")
        axis.set_ylabel(metric.unit)
        axis.set_ylim(bottom=0 if metric.from_zero else None)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(METRICS) :]:
        axis.remove()
    names = axes[0, 0].get_legend_handles_labels()
    if names[0]:
        legend = figure.legend(*names, loc="outside lower center", ncols=4, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a dollar in a label is one
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _drawn(label: str) -> str:
    """A label that fonts can draw: no halves of surrogate pairs, no control characters, not
    endless."""
    text = label.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST_LABEL])
