"""Values for the templates of the report page and of the leaderboard.

The leaderboard has the report's table and charts for several sweeps, of any models and machines.
Numbers that compare with a full cache are comparable where model, weights, pictures and sampling
are the same: such sweeps make a group. What differs between groups is said. Times are comparable on
one device only, which is a column.
"""

import glob
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from experiments.geometry import read_order
from experiments.report import calibration_charts, charts, sweep_files
from experiments.report.template import SMALL_PICTURE, data_uri, template
from experiments.sweep import tables
from varjax.calibration.data import Calibration
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError, some
from varjax.generation.memory import show_bytes

USUAL_BUDGETS = [0.1, 0.25, 0.5]
# {what may differ: entries of a sweep's settings}
DECIDING = {
    "model": ("model", "schedule"),
    "weights": ("model_files", "model_sources"),
    "pictures": ("labels", "text", "seed"),
    "sampling": ("sampling",),
    "types": ("dtype", "weights_dtype", "decode_dtype", "matmul_precision"),
}
BESIDE = ("device", "cache", "versions", "run")  # columns that a single sweep has no need of


def build(
    report: dict,
    samples: dict[str, np.ndarray],
    geometry: Geometry,
    calibration: Calibration | None,
    count: int,
) -> str:
    """Return the page as HTML. count: how many of the sweep's samples are shown."""
    full, rows = samples[tables.FULL], tables.rows(report)
    columns = tables.shown(rows)
    budgets = sorted({cell["budget"] for cell in report["cells"]} - {None}) or USUAL_BUDGETS
    return template(
        "page.html"
    ).render(
        title=f"KV-cache policies on {report['settings']['model']}",
        report=report,
        facts=facts(report, calibration),
        header=tables.header(columns)[:-1],
        rows=[(row["status"], tables.cells_as_text(row, columns)) for row in rows],
        differences=tables.differences_as_text(report),
        intervals=any(key.endswith("_low") for row in rows for key in row),
        budgets=[f"{share:g}" for share in budgets],
        fidelity=charts.fidelity(rows[1:]),  # without the full cache
        judged=[metric.name for metric in columns if metric.is_judged],
        legend_names=charts.labels(rows[1:]),
        names=report["sample_names"][:count],
        full=[data_uri(image) for image in full[:count]],
        tiles=[tile for cell in report["cells"] for tile in _tiles(cell, samples, count)],
        small=full.shape[2] < SMALL_PICTURE,
        left_out=len(full) - count,
        kept=list(_kept(report, samples)),
        live=charts.live_bytes(report),
        measured=calibration_charts.draw(calibration, geometry, budgets),
    )


def _tiles(cell: dict, samples: dict[str, np.ndarray], count: int) -> Iterator[dict]:
    """Yield a cell's picture and numbers for each sample, or once the reason why it did not run."""
    shared = {"policy": cell["label"]}
    if cell["budget"] is not None:
        shared["budget"] = f"{cell['budget']:g}"
    if cell["status"] != "done":
        yield shared | {"reason": f"{cell['status']}: {cell['reason']}"}
        return
    close = {name: [*map(float, v)] for name, v in cell["samples_fidelity"].items()}
    for i, image in enumerate(samples[cell["samples"]][:count]):
        psnr = "identical" if close["psnr"][i] == math.inf else f"{close['psnr'][i]:.1f} dB"
        numbers = f"{psnr}, SSIM {close['ssim'][i]:.3f}, KL {close['kl'][i]:.3g}"
        numbers += f", LPIPS {close['lpips'][i]:.3f}" if "lpips" in close else ""
        if not close.get("class_agreement", [1.0] * count)[i]:
            numbers += ", taken for another class"
        yield shared | {"image": i, "picture": data_uri(image), "numbers": numbers}


def _kept(report: dict, samples: dict[str, np.ndarray]) -> Iterator[tuple[dict[str, str], str]]:
    """Yield (policy and budget, picture) of what heads kept in each cell that tells it."""
    for cell in report["cells"]:
        picture = samples.get(f"{tables.KEPT}/{cell.get('samples')}")
        if picture is not None:
            budget = {} if cell["budget"] is None else {"budget": f"{cell['budget']:g}"}
            yield {"policy": cell["label"]} | budget, data_uri(picture)


def facts(report: dict, calibration: Calibration | None) -> dict[str, str]:
    """Return what was run, on which model, device and settings."""
    s, g, versions = report["settings"], report["geometry"], report["versions"]
    group, used = g.get("queries_per_head", 1), s["calibration"]
    measured = f"none here; the sweep used {tables.short_digests(used)}" if used else "none"
    if calibration is not None:
        images = f"{calibration.num_samples} images, " if calibration.num_samples else ""
        is_own = calibration.digest in (used or "").split("+")
        own = "as in the sweep" if is_own else "not the one of the sweep"
        measured = f"{images}SHA-256 {(calibration.digest or 'unknown')[:16]} ({own})"
    return {
        "images": f"{len(s['labels'])}, seed {s['seed']}, batches of {s['batch_size']}",
        "model": f"{g['num_layers']} layers, {g['num_heads']} heads of {g['head_dim']}, "
        + (f"each of {group} query heads, " if group > 1 else "")
        + read_order(g["schedule"]).outline(),
        "full cache": f"{show_bytes(report['reference']['kv']['dense_bytes'])} for a batch",
        "sampling": ", ".join(f"{key} {value}" for key, value in s["sampling"].items()),
        "computed on": f"{report['device']}, {s['dtype']}, cache in {s['kv_dtype']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "calibration": measured,
    }


# --- the leaderboard ---


def rows_of(folder: pathlib.Path) -> tuple[dict[str, str], list[dict]]:
    """Return ({what decides the numbers: its JSON}, rows of the table that have run) of a sweep.
    Bytes are per image. `UserError`: it is not finished, of another version, or damaged."""
    report, _, _ = sweep_files.read_sweep(folder)
    settings, versions = report["settings"], report["versions"]
    decides = {
        what: json.dumps({name: settings.get(name) for name in of}, sort_keys=True)
        for what, of in DECIDING.items()
    }
    where = {
        "model": settings["model"],
        "device": report["device"],
        "cache": settings["kv_dtype"],
        "versions": f"varjax {versions.get('varjax')}, jax {versions.get('jax')}",
        "run": str(folder),
    }
    rows = [row | where for row in tables.rows(report) if row["status"] == "done"]
    for row in rows:
        for name in ("planned_bytes", "allocated_bytes"):
            row[name] /= settings["batch_size"]
    return decides, rows


def groups(sweeps: Iterable[tuple[dict[str, str], list[dict]]]) -> Iterator[dict]:
    """Yield what the page shows of each group of comparable rows, the largest first: `name`, table,
    charts, labels of their lines, and `why` it is apart: what differs from the first group of the
    same model, or that it is another model."""
    found: dict[tuple, list[dict]] = {}
    for decides, rows in sweeps:
        found.setdefault(tuple(decides.values()), []).extend(rows)
    firsts: dict[str, tuple] = {}  # of each model
    for number, (key, rows) in enumerate(sorted(found.items(), key=lambda item: -len(item[1])), 1):
        first = firsts.setdefault(key[0], key)
        apart = [
            what for what, ours, theirs in zip(DECIDING, key, first, strict=True) if ours != theirs
        ]
        lines = [dict(row) for row in rows if row["policy"] != tables.FULL]
        if len({row["device"] for row in rows}) > 1:  # then a line is a policy on a device
            for line in lines:
                line["label"] += f", {line['device']}"
        columns = tables.shown(rows)
        texts = ([*tables.cells_as_text(row, columns)[:-1], *map(row.get, BESIDE)] for row in rows)
        yield {
            "name": f"{number}: {rows[0]['model']}",
            "why": f"other {', '.join(apart)}" if apart else "another model" if number > 1 else "",
            "header": [*tables.header(columns)[:-1], *BESIDE],
            "rows": list(texts),
            "charts": charts.fidelity(lines, "an image"),
            "labels": charts.labels(lines),
        }


def build_leaderboard(given: Sequence[str]) -> str:
    """Return the page as HTML. given: names and patterns of folders. The page and stderr say why
    sweeps are left out; `UserError` if none can be used, or a pattern finds none."""
    found, left_out = [], []
    folders: dict[pathlib.Path, None] = {}
    for text in given:
        places = [pathlib.Path(place) for place in sorted(glob.glob(text))]
        if glob.has_magic(text):
            places = [place for place in places if (place / sweep_files.REPORT).is_file()]
            if not places:
                raise UserError(f"--leaderboard={text}: no folder of a sweep has such a name")
        folders |= dict.fromkeys(places or [pathlib.Path(text)])
    for folder in folders:
        try:
            found.append(rows_of(folder))
        except UserError as error:
            left_out.append(str(error).removeprefix("--sweep="))
    if not found:
        raise UserError(f"--leaderboard: no sweep can be used: {some(left_out, between='; ')}")
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return template("leaderboard.html").render(
        title="Leaderboard of KV-cache policies", groups=list(groups(found)), left_out=left_out
    )
