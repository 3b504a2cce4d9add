"""Results of several sweeps, of any models and machines: the report's table and charts on one page.

Numbers that compare with a full cache are comparable where model, weights, pictures and sampling
are the same: such sweeps make a group. What differs between groups is said. Times are comparable on
one device only, which is a column.
"""

import glob
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence

from experiments.report import charts, page, sweep_files
from experiments.sweep import tables
from varjax.errors import UserError, some

# {what may differ: entries of a sweep's settings}
DECIDING = {
    "model": ("model", "schedule"),
    "weights": ("model_files", "model_sources"),
    "pictures": ("labels", "text", "seed"),
    "sampling": ("sampling",),
    "types": ("dtype", "weights_dtype", "decode_dtype", "matmul_precision"),
}
BESIDE = ("device", "cache", "versions", "run")  # columns that a single sweep has no need of


def folders(given: Sequence[str]) -> list[pathlib.Path]:
    """Return the folders of sweeps that names and patterns mean, each once, in order. `UserError`
    if a pattern finds none."""
    found: dict[pathlib.Path, None] = {}
    for text in given:
        places = [pathlib.Path(place) for place in sorted(glob.glob(text))]
        if glob.has_magic(text):
            places = [place for place in places if (place / sweep_files.REPORT).is_file()]
            if not places:
                raise UserError(f"--leaderboard={text}: no folder of a sweep has such a name")
        found |= dict.fromkeys(places or [pathlib.Path(text)])
    return list(found)


def rows_of(folder: pathlib.Path) -> tuple[dict[str, str], list[dict]]:
    """Return ({what decides the numbers: its JSON}, rows of the table that have run) of a sweep.
    Bytes are per image. `UserError`: it is not finished, of another version, or damaged."""
    report, _, _ = sweep_files.read(folder)
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


def build(given: Sequence[str]) -> str:
    """Return the page as HTML. The page and stderr say why sweeps are left out; `UserError` if none
    can be used."""
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
    return page.template("leaderboard.html").render(
        title="Leaderboard of KV-cache policies", groups=list(groups(found)), left_out=left_out
    )
