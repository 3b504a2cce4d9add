"""Joining the parts of a sweep."""

import pathlib
from collections.abc import Sequence

import numpy as np

from experiments import batch_files, parts
from experiments.batch_files import Damaged
from experiments.parts import Part
from experiments.sweep import tables
from varjax.errors import UserError
from varjax.storage.manifest import parse_json


def join(out: pathlib.Path, found: list[Part]) -> str:
    """Write the results of a sweep in place of its parts; return the table."""
    frame = found[0].content["frame"] | {"device": parts.device_of(found)}
    for part in found[1:]:
        if part.content["frame"]["cells"] != frame["cells"]:
            raise UserError(
                f"{part.shard} is of other --policies or --budgets than {found[0].shard}: remove "
                "it and make it again with the flags of the others"
            )
    held = [{key: _cell(part, key) for key in part.content["keys"]} for part in found]
    _check_reference(found, [cells[frame["reference"]] for cells in held])
    known = {key: cell for cells in reversed(held) for key, cell in cells.items()}
    keys = [frame["reference"], *(cell["samples"] for cell in frame["cells"] if "samples" in cell)]
    results = {key: known[key] for key in keys}
    calibration = found[0].arrays.get("calibration")
    copy = None if calibration is None else calibration.tobytes()
    report = tables.write(out, parts.files_of_parts, frame, results, copy)
    return tables.markdown_rows(report)


def _cell(part: Part, key: str) -> dict:
    """Return what is stored of a cell, as `experiments.sweep.cells.Runner.keep` wrote it."""
    path = part.work.path / f"cell-{key}.npz"
    try:
        arrays = batch_files.read(path)
        return arrays | {"row": parse_json(str(arrays.pop("row")))}
    except (Damaged, OSError, KeyError, ValueError):
        raise UserError(f"{path} is missing or damaged: {parts.again(part.work.path)}") from None


def _check_reference(found: Sequence[Part], full: Sequence[dict]) -> None:
    """`UserError` unless the full cache drew the same in all parts."""
    for part, theirs in zip(found, full, strict=True):
        if not np.array_equal(theirs["tokens"], full[0]["tokens"]):
            raise UserError(
                f"the full cache drew other tokens in {part.shard} than in {found[0].shard}, so "
                "their cells have no common reference: make them on devices of one kind"
            )
