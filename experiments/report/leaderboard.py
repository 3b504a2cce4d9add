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
import sys
from collections.abc import Iterable, Sequence

from experiments.report import sweep_files
from experiments.report.templates import template
from varjax.errors import UserError, about, show, some
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
SCORES = "psnr kl ssim token_agreement lpips class_agreement fid".split()
# {number of a row: the least and the greatest plausible value}
RANGES = {
    "fraction": (0, 10),
    "psnr": (-100, 100),
    "kl": (0, 1e6),
    "ssim": (-1, 1),
    "token_agreement": (0, 1),
    "lpips": (0, 10),
    "class_agreement": (0, 1),
    "fid": (0, 1e6),
}


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
    report, _, _ = sweep_files.read(folder)
    settings = report["settings"]
    decides = {what: _digest({n: settings.get(n) for n in of}) for what, of in DECIDING.items()}
    cells = [c for c in report["cells"] if c["status"] == "done"]
    rows = [_row(folder, report, cell) for cell in cells]
    full = {"label": "full", "policy": "full", "budget": 1.0, **report["reference"]}
    return decides, [_row(folder, report, full), *rows]


def _row(folder: pathlib.Path, report: dict, cell: dict) -> dict:
    versions, settings = report["versions"], report["settings"]
    with about(f"{folder}: {show(cell['label'])} at {cell['budget']}"):
        numbers = _numbers(cell)
    return {
        "run": str(folder),
        "model": settings["model"],
        "policy": cell["label"],
        "budget": cell["budget"],
        "bytes": cell["kv"]["allocated_bytes"] // settings["batch_size"],
        "speed": 1 / cell["time"]["steady_s_per_image"],
        "device": report["device"],
        "cache": settings["kv_dtype"],
        "versions": f"varjax {versions.get('varjax')}, jax {versions.get('jax')}",
        **numbers,
    }


def _numbers(cell: dict) -> dict[str, float | None]:
    """Return the numbers of `RANGES` of a cell; `UserError` for one that cannot be."""
    kv, close = cell["kv"], cell.get("fidelity") or {}
    allocated, dense = kv["allocated_bytes"], kv["dense_bytes"]
    fraction = allocated / max(1, dense)
    if abs(kv["fraction"] - fraction) > TOLERANCE:
        raise UserError(
            f"the fraction {kv['fraction']:g} is not {allocated} of {dense} bytes: the file was "
            "edited, run the sweep again"
        )
    found = {"fraction": fraction, **{key: _number(close.get(key)) for key in SCORES}}
    for key, (low, high) in RANGES.items():
        if found[key] is not None and not low <= found[key] <= high:
            raise UserError(
                f"{key} is {found[key]:g}, it must be from {low:g} to {high:g}: run the sweep again"
            )
    return found


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


def usable(
    given: Sequence[str],
) -> tuple[list[tuple[dict[str, str], list[dict]]], list[str]]:
    """Return what `rows_of` finds in every sweep, and why others are left out, which stderr also
    says.

    Raises:
      UserError: no sweep can be used.
    """
    found, left_out = [], []
    for folder in folders(given):
        try:
            found.append(rows_of(folder))
        except UserError as error:
            left_out.append(str(error).removeprefix("--sweep="))
    if not found:
        raise UserError(f"--leaderboard: no sweep can be used: {some(left_out, between='; ')}")
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return found, left_out


def build(given: Sequence[str]) -> str:
    """Return the page as HTML."""
    sweeps, left_out = usable(given)
    found = groups(sweeps)
    rows = [row for group in found for row in group["rows"]]
    scores = [key for key in SCORES if any(row[key] is not None for row in rows)]
    columns = {key: METRICS[key].column if key in METRICS else "FID" for key in scores}
    better = {key: METRICS[key].better if key in METRICS else "lower" for key in scores}
    return template("leaderboard.html", sort_keys=False).render(
        groups=[{"name": g["name"], "why": g["why"], "count": len(g["rows"])} for g in found],
        data={"rows": rows, "scores": columns, "better": better},
        left_out=left_out,
    )
