"""Files of finished cells of a sweep, sealed (`batch_files`). A file that is damaged in any way
counts as missing, so that its cell is run again."""

import json
import pathlib
from collections.abc import Mapping

import numpy as np

from experiments import batch_files
from experiments.batch_files import Damaged
from experiments.sweep.plan import Cell
from varjax.io.json_text import json_safe
from varjax.storage.manifest import parse_json


def write(
    path: pathlib.Path, settings: str, row: Mapping, arrays: Mapping[str, np.ndarray]
) -> None:
    """Write the numbers and arrays of a cell. settings: digest of the sweep's settings."""
    batch_files.write(path, settings, {**arrays, "row": np.array(json.dumps(json_safe(row)))})


def read(path: pathlib.Path, cell: Cell) -> dict | None:
    """Return {"row": numbers, "samples": uint8 images, ...} of a finished cell; None if the file is
    missing, damaged, or of another cell."""
    try:
        found = batch_files.read(path)
        row = parse_json(str(found.pop("row", "")))
    except (Damaged, OSError, ValueError):
        return None
    asked = {"policy": cell.name, "policy_args": cell.arguments, "budget": cell.budget}
    asked = json_safe(asked | {"plan": cell.plan.digest})
    same = isinstance(row, dict) and all(row.get(name) == asked[name] for name in asked)
    return found | {"row": row} if same else None
