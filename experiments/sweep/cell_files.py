"""Files of finished cells of a sweep. A file that is damaged in any way counts as missing, so that
its cell is run again."""

import json
import pathlib
from collections.abc import Mapping

import numpy as np

from experiments import batch_files
from experiments.batch_files import Damaged
from experiments.report import sweep_files
from experiments.report.json_values import check
from experiments.sweep.intervals import PER_IMAGE
from experiments.sweep.plan import Cell, Sweep
from varjax.io.json_text import json_safe
from varjax.storage.manifest import parse_json


def write(
    path: pathlib.Path, settings: str, row: Mapping, arrays: Mapping[str, np.ndarray]
) -> None:
    """Write the numbers and arrays of a cell. settings: digest of the sweep's settings."""
    batch_files.write(path, settings, {**arrays, "row": np.array(json.dumps(json_safe(row)))})


def read(path: pathlib.Path, sweep: Sweep, cell: Cell) -> dict | None:
    """Return {"row": numbers, "samples": uint8 images, ...} of a finished cell; None if the file is
    missing or damaged."""
    try:
        found = batch_files.read(path)
        row = parse_json(str(found.pop("row", "")))
        check_row(row, sweep, cell)
        check_arrays(found, sweep, cell)
    except (Damaged, OSError, ValueError):
        return None
    return found | {"row": row}


def check_row(row: object, sweep: Sweep, cell: Cell) -> None:
    """Raise `Damaged` unless the row has everything that the tables and the report show."""
    check(row, {"plan": "text"}, "row")
    asked = {"policy": cell.name, "policy_args": cell.arguments, "budget": cell.budget}
    for name, value in json_safe(asked | {"plan": cell.plan.digest}).items():
        if row.get(name) != value:
            raise Damaged(f"row.{name} is that of another cell")
    geometry = sweep.full.plan.geometry
    if cell is sweep.full:
        return sweep_files.check_sizes(row, geometry, "row")
    sweep_files.check_cell(row, geometry, "row")
    shown = (row["samples_fidelity"][name] for name in sweep_files.SHOWN_PER_IMAGE)
    if any(len(numbers) != sweep.samples for numbers in shown):
        raise Damaged(f"row.samples_fidelity has other than {sweep.samples} numbers")


def check_arrays(found: Mapping[str, np.ndarray], sweep: Sweep, cell: Cell) -> None:
    """Raise `Damaged` unless the arrays have the shapes and types that this sweep stores."""
    count, size = len(sweep.condition), sweep.model.pixels
    wanted = {"samples": ("u", (sweep.samples, *size, 3))}
    if cell is sweep.full:
        tokens = sweep.model.transformer.no_tokens(count)
        wanted |= {"tokens": (tokens.dtype.kind, tokens.shape)}
        wanted |= {"pictures": ("f", (count, *size, 3))}
    wanted |= {name: ("f", (count,)) for name in found if name.startswith(PER_IMAGE)}
    if unknown := found.keys() - wanted.keys():
        raise Damaged(f"it holds {min(unknown)}, which no cell has")
    for name, (kind, shape) in wanted.items():
        array = found.get(name)
        if array is None or array.dtype.kind != kind or array.shape != shape:
            raise Damaged(f"{name} is not of shape {shape}")
