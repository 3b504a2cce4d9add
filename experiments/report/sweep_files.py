"""Reading a sweep's folder: what the page shows is there and of the right type, or the message
names the file and the place in it."""

import json
import math
import pathlib
import zipfile
import zlib
from typing import Any

import numpy as np

from experiments.sweep import tables
from varjax.cache.geometry import Geometry
from varjax.errors import UserError
from varjax.schedule import Schedule

REPORT, SAMPLES = "sweep.json", "samples.npz"
UNREADABLE = (
    *(ValueError, KeyError, EOFError, TypeError, AttributeError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)


class Damaged(Exception):
    """What is wrong with a file, in words."""


def read(folder: pathlib.Path) -> tuple[dict, dict[str, np.ndarray], Geometry]:
    """(content of sweep.json, arrays of samples.npz, the model's geometry) of a finished sweep.

    Raises:
      UserError: no finished sweep, of another version, or with damaged files.
    """
    report = _open(folder, REPORT, _load_json)
    version = report.get("format_version") if isinstance(report, dict) else None
    if version != tables.FORMAT_VERSION:
        raise UserError(
            f"--sweep={folder}: format_version is {version!r:.80}, this version of varjax reads "
            f"{tables.FORMAT_VERSION}: run the sweep again"
        )
    samples = _open(folder, SAMPLES, _load_arrays)
    name = REPORT
    try:
        geometry = check_report(report)
        name = SAMPLES
        check_samples(report, samples)
    except Damaged as error:
        raise _damaged(folder, name, error) from None
    return report, samples, geometry


def _open(folder: pathlib.Path, name: str, load) -> Any:
    try:
        return load(folder / name)
    except OSError as error:
        raise UserError(
            f"--sweep={folder} is no finished sweep ({error.strerror or error}: {name}): give the "
            f"folder that `python -m experiments.sweep` has written"
        ) from None
    except UNREADABLE as error:
        raise _damaged(folder, name, error) from None


def _damaged(folder: pathlib.Path, name: str, reason: Exception) -> UserError:
    return UserError(
        f"--sweep={folder}: its files are damaged: {name}: {str(reason):.300}: run the sweep again"
    )


def _load_json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _load_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


# --- what must be there ---
# A dict: these keys and perhaps others; a list: any number of such entries; a function: a test,
# which NAMES puts into words.


def text(value) -> bool:
    return isinstance(value, str)


def text_or_null(value) -> bool:
    return value is None or isinstance(value, str)


def number(value) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and abs(value) < 1e300 and math.isfinite(value)


def positive(value) -> bool:
    return number(value) and value > 0


def number_or_word(value) -> bool:
    """Also what JSON lacks, as `pixel.json_safe` writes it."""
    return number(value) or value in ("inf", "-inf", "nan")


def whole(value) -> bool:
    return number(value) and isinstance(value, int)


def budget_or_null(value) -> bool:
    return value is None or (number(value) and 0 < value <= 1)


def mapping(value) -> bool:
    return isinstance(value, dict)


def texts_by_name(value) -> bool:
    return mapping(value) and all(map(text, value.values()))


NAMES = {
    text: "text",
    text_or_null: "text or null",
    number: "a number",
    positive: "a positive number",
    number_or_word: "a number",
    whole: "a whole number",
    budget_or_null: "a fraction in (0, 1] or null",
    mapping: "an object",
    texts_by_name: "an object of texts",
}
REPORT_SPEC = {
    "settings": {
        **{key: text for key in ("model", "dtype", "kv_dtype")},
        **{"labels": [whole], "seed": whole, "batch_size": whole},
        **{"sampling": mapping, "calibration": text_or_null},
    },
    "geometry": {
        "schedule": text,
        **{key: whole for key in ("num_layers", "num_heads", "head_dim", "rows_per_image")},
    },
    "device": text,
    "versions": texts_by_name,
    "sample_names": [text],
    "definitions": texts_by_name,
    "reference": mapping,
    "cells": [mapping],
}
CELL = {"label": text, "policy": text, "budget": budget_or_null, "status": text}
NOT_RUN = CELL | {"reason": text}
SIZES = "dense_bytes planned_bytes allocated_bytes slot_bytes dense_slots".split()
REFERENCE = CELL | {
    "kv": {"fraction": number, **{key: number for key in SIZES}},
    "time": {"steady_s_per_image": number},
}
MEASURED = {"psnr": number, "ssim": number, "token_agreement": number, "kl": number_or_word}
DONE = REFERENCE | {
    "kv": REFERENCE["kv"] | {"allocated_bytes": positive},  # its axis is logarithmic
    "fidelity": MEASURED,
    "samples_fidelity": {"psnr": [number_or_word], "ssim": [number], "kl": [number_or_word]},
    "live_tokens": [[number]],
    "used_slots": [[number]],
    "samples": text,
}


def require(value: Any, spec: Any, place: str = "") -> None:
    """Raise `Damaged` if `value` is not as `spec` says; `place` is where it stands."""
    if isinstance(spec, dict):
        _require_type(value, dict, "an object", place)
        for key, part in spec.items():
            inner = f"{place}.{key}" if place else key
            if key not in value:
                raise Damaged(f"{inner} is missing")
            require(value[key], part, inner)
    elif isinstance(spec, list):
        _require_type(value, list, "a list", place)
        for i, item in enumerate(value):
            require(item, spec[0], f"{place}[{i}]")
    elif not spec(value):
        raise Damaged(f"{place} is {value!r:.60}, it must be {NAMES[spec]}")


def _require_type(value: Any, kind: type, words: str, place: str) -> None:
    if not isinstance(value, kind):
        raise Damaged(f"{place} is {value!r:.60}, it must be {words}")


def check_report(report: dict) -> Geometry:
    """The geometry of a report that has everything the page shows.

    Raises:
      Damaged: what is missing or of a wrong type.
    """
    require(report, REPORT_SPEC)
    fields = {key: report["geometry"][key] for key in REPORT_SPEC["geometry"]}
    try:
        geometry = Geometry(schedule=Schedule.parse(fields.pop("schedule")), **fields)
    except UserError as error:
        raise Damaged(str(error)) from None
    require(report["reference"], REFERENCE, "reference")
    for i, cell in enumerate(report["cells"]):
        place = f"cells[{i}]"
        require(cell, CELL, place)
        require(cell, DONE if cell["status"] == "done" else NOT_RUN, place)
        if cell["status"] == "done":
            _check_steps(cell, geometry, place)
    return geometry


def _check_steps(cell: dict, geometry: Geometry, place: str) -> None:
    """Every layer of every scale has its count."""
    scales, layers = geometry.schedule.num_scales, geometry.num_layers
    for name in ("live_tokens", "used_slots"):
        rows = cell[name]
        if len(rows) != scales or any(len(row) != layers for row in rows):
            raise Damaged(f"{place}.{name} is not {scales} lists of {layers} numbers")


# --- samples ---


def check_samples(report: dict, samples: dict[str, np.ndarray]) -> None:
    """Raise `Damaged` if a cell lacks pictures, or a picture its name or its numbers."""
    full = _pictures(samples, tables.FULL)
    if len(report["sample_names"]) != len(full):
        raise Damaged(f"{len(full)} images, but {len(report['sample_names'])} names in {REPORT}")
    for cell in report["cells"]:
        if cell["status"] != "done":
            continue
        found = _pictures(samples, cell["samples"])
        if found.shape != full.shape:
            raise Damaged(f"{cell['samples']} has shape {found.shape}, {full.shape} is expected")
        numbers = cell["samples_fidelity"]
        if any(len(numbers[name]) != len(full) for name in DONE["samples_fidelity"]):
            raise Damaged(f"{len(full)} images of {cell['label']}, other counts in {REPORT}")


def _pictures(samples: dict[str, np.ndarray], name: str) -> np.ndarray:
    """uint8 [n, H, W, 3] of that name."""
    if name not in samples:
        raise Damaged(f"the array {name} is missing")
    found = samples[name]
    if found.dtype != np.uint8 or found.ndim != 4 or found.shape[-1] != 3 or not found.size:
        raise Damaged(f"{name} is {found.dtype} {found.shape}, no uint8 images are there")
    return found
