"""Results of several sweeps, of any models and machines, on one page that can be filtered.

Numbers that compare with a full cache are comparable where model, weights, pictures and sampling
are the same: such sweeps make a group. What differs between groups is said. Times are comparable on
one device only, which is a column.
"""

import glob
import hashlib
import json
import math
import pathlib
from collections.abc import Iterable, Sequence

from experiments.report import sweep_files
from experiments.report.templates import template
from varjax.errors import UserError
from varjax.metrics import METRICS

# {what may differ: entries of a sweep's settings}
DECIDING = {
    "model": ("model", "schedule"),
    "weights": ("model_files", "model_sources"),
    "pictures": ("labels", "text", "seed"),
    "sampling": ("sampling",),
    "types": ("dtype", "weights_dtype", "decode_dtype", "matmul_precision"),
}
MOST_RUNS = 1000
TOLERANCE = 1e-6  # of a fraction that follows from two numbers of bytes
SCORES = ("psnr", "kl", "ssim", "token_agreement", "lpips", "class_agreement")


def folders(given: Sequence[str]) -> list[pathlib.Path]:
    """Return the folders of sweeps that names and patterns mean, each once, in order.

    Raises:
      UserError: a name is no folder of a sweep; a pattern finds none; there are too many.
    """
    found: dict[pathlib.Path, None] = {}
    for text in given:
        places = sorted(glob.glob(text)) if glob.has_magic(text) else [text]
        places = [pathlib.Path(place) for place in places]
        if glob.has_magic(text):
            places = [place for place in places if (place / sweep_files.REPORT).is_file()]
            if not places:
                raise UserError(f"--leaderboard={text}: no folder of a sweep has such a name")
        for place in places:
            found[place.parent if place.name == sweep_files.REPORT else place] = None
    if len(found) > MOST_RUNS:
        raise UserError(f"--leaderboard names {len(found)} sweeps: at most {MOST_RUNS}")
    return list(found)


def rows_of(folder: pathlib.Path) -> tuple[dict[str, str], list[dict]]:
    """Return ({what decides the numbers: digest}, rows of the table) of a sweep.

    Raises:
      UserError: it is not finished, of another version, damaged, or its numbers contradict each
        other.
    """
    try:
        report, _, _ = sweep_files.read(folder)
    except UserError as error:
        raise UserError(str(error).replace("--sweep=", "--leaderboard=")) from None
    settings = report["settings"]
    decides = {what: _digest({n: settings.get(n) for n in of}) for what, of in DECIDING.items()}
    cells = [c for c in report["cells"] if c["status"] == "done"]
    rows = [_row(folder, report, cell) for cell in cells]
    full = {"label": "full", "policy": "full", "budget": 1.0, **report["reference"]}
    return decides, [_row(folder, report, full), *rows]


def _row(folder: pathlib.Path, report: dict, cell: dict) -> dict:
    kv, close = cell["kv"], cell.get("fidelity") or {}
    allocated, dense = kv["allocated_bytes"], kv["dense_bytes"]
    share = kv.get("fraction")
    if share is not None and dense and abs(share - allocated / dense) > TOLERANCE:
        raise UserError(
            f"--leaderboard={folder}: {cell['label']} at {cell['budget']}: the fraction {share:g} "
            f"is not {allocated} of {dense} bytes: the file was edited, run the sweep again"
        )
    seconds = cell.get("time", {}).get("steady_s_per_image")
    versions = report["versions"]
    return {
        "run": str(folder),
        "model": report["settings"]["model"],
        "policy": cell["label"],
        "budget": cell["budget"],
        "fraction": allocated / dense if dense else 1.0,
        "bytes": allocated // max(1, report["settings"]["batch_size"]),
        "speed": 1 / seconds if seconds else None,
        "device": report["device"],
        "cache": report["settings"]["kv_dtype"],
        "versions": f"varjax {versions.get('varjax')}, jax {versions.get('jax')}",
        "fid": close.get("fid"),
        **{key: _number(close.get(key)) for key in SCORES},
    }


def _number(value: object) -> float | None:
    """Return a number for JSON. Infinite ones are texts in sweep.json."""
    number = None if value is None else float(value)
    return number if number is None or math.isfinite(number) else None


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def groups(sweeps: Iterable[tuple[dict[str, str], list[dict]]]) -> list[dict]:
    """Return groups of comparable rows, the largest first; each says what differs from the first
    group of the same model, or that it is another model."""
    found: dict[tuple, dict] = {}
    for decides, rows in sweeps:
        group = found.setdefault(tuple(decides.values()), {"decides": decides, "rows": []})
        group["rows"] += rows
    ordered = sorted(found.values(), key=lambda group: -len(group["rows"]))
    for i, group in enumerate(ordered):
        before = ordered[:i]
        same = [g for g in before if g["decides"]["model"] == group["decides"]["model"]]
        apart = [w for w in DECIDING if same and same[0]["decides"][w] != group["decides"][w]]
        group["why"] = f"other {', '.join(apart)}" if apart else "another model" if before else ""
        group["name"] = f"{i + 1}: {group['rows'][0]['model']}"
        for row in group["rows"]:
            row["group"] = group["name"]
    return ordered


def build(given: Sequence[str]) -> str:
    """Return the page as HTML."""
    found = groups([rows_of(folder) for folder in folders(given)])
    rows = [row for group in found for row in group["rows"]]
    scores = [key for key in (*SCORES, "fid") if any(row[key] is not None for row in rows)]
    columns = {key: METRICS[key].column if key in METRICS else "FID" for key in scores}
    better = {key: METRICS[key].better if key in METRICS else "lower" for key in scores}
    return template("leaderboard.html", sort_keys=False).render(
        groups=[{"name": g["name"], "why": g["why"], "count": len(g["rows"])} for g in found],
        data={"rows": rows, "scores": columns, "better": better},
    )
