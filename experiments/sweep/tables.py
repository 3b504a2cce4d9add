"""Files of a finished sweep: a table as CSV and Markdown, all numbers as JSON, samples, a plot."""

import csv
import io
import pathlib
import sys
from collections.abc import Container, Iterable, Sequence

import numpy as np

from experiments.evaluation import metrics
from experiments.evaluation.metrics import METRICS, Metric
from experiments.generation import environment
from experiments.json_text import json_text
from experiments.sweep import intervals
from experiments.sweep.intervals import PER_IMAGE
from experiments.sweep.plan import Sweep
from varjax.storage.atomic import Written, new_folder, write_text
from varjax.storage.values import MissingExtra, require

FORMAT_VERSION = 1
FULL = "full"
KEPT = "kept"  # of a cell in samples.npz: the picture of what heads kept
CALIBRATION_COPY = "calibration.json"
DEFINITIONS = {
    "planned, allocated": "bytes of the buffer that holds keys and values of one batch, as planned "
    "and as read off the compiled program; the percentage is of the full cache",
    "s/image": "median over at least two runs after the first, pixels included; the program also "
    "returns its logits",
}
ASKED = ("label", "policy", "budget", "status")  # entries of every cell in sweep.json
_KV = "dense_bytes planned_bytes allocated_bytes fraction peak_live_fraction read_fraction".split()
_TIME = ["steady_s_per_image", "compile_s"]


def parts() -> dict[str, list[str]]:
    """Return {part of a cell in sweep.json: its entries that the table takes}."""
    fidelity = ["identical_images"]
    for key in METRICS:
        ends = ["", "_std", "_low", "_high"]
        ends += [f"_difference{end}" for end in ("", "_low", "_high")]
        fidelity += [f"{key}{end}" for end in ends]
    return {"kv": _KV, "time": _TIME, "fidelity": fidelity}


def csv_fields() -> list[str]:
    """Return the columns of sweep.csv; those of metrics of the user's own come last."""
    return [*ASKED, *_KV, *_TIME, "note", *parts()["fidelity"]]


# --- content ---


def frame(sweep: Sweep) -> dict:
    """Return what sweep.json says besides results, as JSON data: a sweep in parts has it in every
    part. `key`: names the results of a cell."""
    g = sweep.model.geometry
    shown = sweep.condition.captions or [f"class {i}" for i in sweep.condition.numbers]
    cells = []
    for cell in sweep.cells:
        status = "done" if cell.plan else "skipped" if cell.budget is None else "infeasible"
        more = {"samples": cell.key} if cell.plan else {"reason": cell.reason}
        asked = {"label": cell.label, "policy": cell.name, "budget": cell.budget}
        cells.append(asked | {"status": status} | more)
    sizes = ["num_layers", "num_heads", "head_dim", "rows_per_image"]
    sizes += ["queries_per_head"] * (g.queries_per_head > 1)
    return {
        "format_version": FORMAT_VERSION,
        "settings": sweep.describe(),
        "geometry": {"schedule": str(g.schedule), **{name: getattr(g, name) for name in sizes}},
        **environment(),
        "sample_names": list(shown[: sweep.samples]),
        "reference": sweep.full.key,
        "cells": cells,
    }


def content(found: dict, results: dict[str, dict]) -> dict:
    """Return the content of sweep.json. found: the sweep's `frame`. results: what is stored of each
    cell, by its key."""
    cells = [
        results[cell["samples"]]["row"] | cell if "samples" in cell else cell
        for cell in found["cells"]
    ]
    intervals.add(cells, per_image(results))
    reference = results[found["reference"]]["row"] | {"status": "done", "samples": FULL}
    rest = {name: value for name, value in found.items() if name not in ("reference", "cells")}
    return {**rest, "definitions": definitions(cells), "reference": reference, "cells": cells}


def definitions(cells: Sequence[dict]) -> dict[str, str]:
    """Return {column: its meaning}; of intervals and differences if there are any."""
    (first, planned), *last = DEFINITIONS.items()
    keys = {key for cell in cells for key in cell.get("fidelity", {})}
    found = {first: planned, **metrics.definitions(shown([keys])), **dict(last)}
    if keys:
        known = any(key.endswith("_low") for key in keys)
        found["[low, high]"] = intervals.DEFINITION if known else intervals.UNKNOWN
    if any(key.endswith("_difference") for key in keys):
        found["difference to the best"] = intervals.DIFFERENCE
    return found


def per_image(results: dict[str, dict]) -> dict[str, dict[str, np.ndarray]]:
    """Return {cell: {metric: float [N]}}; of the full cache nothing."""
    return {
        key: {n.removeprefix(PER_IMAGE): a for n, a in stored.items() if n.startswith(PER_IMAGE)}
        for key, stored in results.items()
    }


def samples(found: dict, results: dict[str, dict]) -> dict[str, np.ndarray]:
    """Return the arrays of samples.npz: `labels` int [n], uint8 [n, H, W, 3] for `full` and each
    cell, and `CELL/METRIC` float [N]: of all N images, of which n are shown. With --save_kept
    `kept/CELL` uint8 [height, width, 3]: what heads kept of the first. found: the `frame`."""
    settings, numbers = found["settings"], per_image(results)
    labels = np.array(settings["labels"][: settings["samples"]], np.int64)
    keys = list({cell["samples"]: None for cell in found["cells"] if "samples" in cell})
    pictures = {FULL: results[found["reference"]]["samples"]}
    pictures |= {key: results[key]["samples"] for key in keys}
    every = {f"{key}/{name}": a for key in keys for name, a in numbers.get(key, {}).items()}
    every |= {f"{KEPT}/{key}": results[key][KEPT] for key in keys if KEPT in results[key]}
    return {"labels": labels, **pictures, **every}


# --- tables ---


def shown(found: Iterable[Container[str]]) -> list[Metric]:
    """Return the metrics that have a column, in order; those that networks judge only if some row
    of the table has them. found: its rows."""
    found = list(found)
    return [m for key, m in METRICS.items() if not m.is_judged or any(key in row for row in found)]


def header(columns: Sequence[Metric]) -> list[str]:
    """Return the names of the table's columns. columns: the metrics that `shown` gives."""
    names = [metric.column for metric in columns]
    return ["policy", "budget", "KV planned", "KV allocated", *names, "s/image", "note"]


def rows(report: dict) -> list[dict]:
    """Return a flat dict for each row of the table, the full cache first. Unknown entries are
    absent."""
    found = []
    for cell in (report["reference"], *report["cells"]):
        row = {name: cell[name] for name in ASKED}
        for part, names in parts().items() if cell["status"] == "done" else ():
            row |= {name: cell[part][name] for name in names if name in cell.get(part, {})}
        found.append(row | {"note": cell.get("reason", "")})
    return found


def csv_text(report: dict) -> str:
    """Return the text of sweep.csv."""
    out = io.StringIO()
    writer = csv.DictWriter(
        out, csv_fields(), restval="", extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows(report))
    return out.getvalue()


def cells_as_text(row: dict, columns: Sequence[Metric]) -> list[str]:
    """Return the texts of a row. columns: the metrics that `shown` gives. Unknown is empty."""
    budget = "" if row["budget"] is None else f"{row['budget']:g}"
    planned = allocated = seconds = ""
    note = f"{row['status']}: {row['note']}"
    if row["status"] == "done":
        planned, allocated = (
            f"{row[n] / 2**20:.2f} MiB" for n in ("planned_bytes", "allocated_bytes")
        )
        allocated += f" ({row['fraction']:.1%})"
        seconds, note = f"{row['steady_s_per_image']:.3f}", row["note"]
    close = [_with_interval(metric, row, metric.key) for metric in columns]
    return [row["label"], budget, planned, allocated, *close, seconds, note]


def _with_interval(metric: Metric, row: dict, name: str) -> str:
    """Return a mean and, where it is known, its interval: `26.08 dB [25.49, 26.68]`."""
    if name not in row:
        return ""
    ends = [row[f"{name}_{end}"] for end in ("low", "high") if f"{name}_{end}" in row]
    number = metric.shown.split()[0]  # without the unit
    between = ", ".join(number.format(float(end)) for end in ends)
    return metric.show(row[name]) + (f" [{between}]" if len(ends) == 2 else "")


def differences_as_text(report: dict) -> list[list[str]]:
    """Return a header and rows by ascending budget. Only cells that share their budget with another
    one are compared; empty if there are none."""
    every = rows(report)
    found = [row for row in every if row["status"] == "done" and row["budget"] is not None]
    lines, columns = [], shown(every)
    for budget in sorted({row["budget"] for row in found}):
        rivals = [row for row in found if row["budget"] == budget]
        compared = [key for key in METRICS if any(f"{key}_difference" in r for r in rivals)]
        for row in rivals if compared else []:
            texts = {
                key: _with_interval(METRICS[key], row, f"{key}_difference")
                or ("best" if key in row else "")
                for key in compared
            }
            if any(texts.values()):
                cells = (texts.get(metric.key, "") for metric in columns)
                lines.append([f"{budget:g}", row["label"], *cells])
    header = ["budget", "policy", *(metric.column for metric in columns)]
    return [header, *lines] if lines else []


def markdown_rows(report: dict) -> str:
    """Return the table in Markdown."""
    lines, every = [], rows(report)
    columns = shown(every)
    for row in every:
        label, *rest, note = cells_as_text(row, columns)
        lines.append([f"`{label}`", *rest, note.replace("|", "\\|").replace("\n", " ")])
    return markdown_table(header(columns), lines)


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    every = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def short_digests(used: str | None) -> str:
    """Return the beginnings of the SHA-256 that a report's `calibration` names."""
    return " and ".join(digest[:16] for digest in (used or "none").split("+"))


def outline(report: dict) -> str:
    """Return one line that says what was run."""
    s, versions = report["settings"], report["versions"]
    return (
        f"{s['model']}: {len(s['labels'])} images, seed {s['seed']}, batches of "
        f"{s['batch_size']}, {s['dtype']}, cache in {s['kv_dtype']}, {report['device']}, "
        f"varjax {versions.get('varjax')}, jax {versions.get('jax')}; calibration "
        f"{short_digests(s['calibration'])}"
    )


def markdown(report: dict) -> str:
    """Return the text of sweep.md: what was run, the table, what its columns mean."""
    notes = [f"- {name}: {text}." for name, text in report["definitions"].items()]
    if apart := differences_as_text(report):
        notes = [*notes, "", "Differences to the best cell of the same budget, image by image:", ""]
        lines = [[share, f"`{label}`", *rest] for share, label, *rest in apart[1:]]
        notes.append(markdown_table(apart[0], lines))
    return "\n".join(["# Sweep", "", outline(report), "", markdown_rows(report), "", *notes]) + "\n"


# --- files ---


def write_tables(
    out: pathlib.Path,
    replaces: Written | None,
    found: dict,
    results: dict[str, dict],
    calibration: bytes | None = None,
) -> dict:
    """Write the folder of a finished sweep; return the content of sweep.json. stderr says why if
    the plot is missing.

    replaces: which folders it may replace. found: the sweep's `frame`. results: what is stored of
    each cell, by its key. calibration: the file that the sweep used, to keep a copy."""
    report = content(found, results)
    with new_folder(out, replaces=replaces) as folder:
        if calibration is not None:
            (folder / CALIBRATION_COPY).write_bytes(calibration)
        write_text(folder / "sweep.csv", csv_text(report))
        write_text(folder / "sweep.md", markdown(report))
        np.savez(folder / "samples.npz", **samples(found, results))
        try:
            for package in ("altair", "vl_convert"):
                require(package, extra="eval", purpose="plotting")
            from experiments.report import charts  # which imports them

            charts.save(folder / "fidelity.png", rows(report)[1:], charts.fidelity)
            charts.save(folder / "arguments.png", rows(report)[1:], charts.over_arguments)
        except MissingExtra as error:
            print(f"no plots are written: {error}", file=sys.stderr)
        files = sorted({path.name for path in folder.iterdir()} | {"sweep.json"})
        write_text(folder / "sweep.json", json_text(report | {"files": files}))
    return report
