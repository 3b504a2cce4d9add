"""Reading a sweep's folder: what the page shows is there and of the right type, or the message
names the file and the place in it."""

import json
import math
import pathlib
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.sweep import tables
from varjax.cache.allocation import Geometry
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
    `UserError` for none, one of another version, or with damaged files."""
    report = _open(folder, REPORT, lambda path: json.loads(path.read_text(encoding="utf-8")))
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


def _open(folder: pathlib.Path, name: str, load: Callable[[pathlib.Path], Any]) -> Any:
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


def _load_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


# --- what must be there ---
# A dict: these keys and perhaps others; a list: any number of such entries; a text: one of KINDS.


def _number(value) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and abs(value) < 1e300 and math.isfinite(value)


KINDS = {
    "text": lambda v: isinstance(v, str),
    "text or null": lambda v: v is None or isinstance(v, str),
    "a number": _number,
    "a positive number": lambda v: _number(v) and v > 0,
    # also what JSON lacks, as `json_text.json_safe` writes it
    "a number or infinite": lambda v: _number(v) or v in ("inf", "-inf", "nan"),
    "a whole number": lambda v: _number(v) and isinstance(v, int),
    "a fraction in (0, 1] or null": lambda v: v is None or (_number(v) and 0 < v <= 1),
    "a list": lambda v: isinstance(v, list),
    "an object": lambda v: isinstance(v, dict),
    "an object of texts": lambda v: isinstance(v, dict) and all(map(KINDS["text"], v.values())),
}
SETTINGS = {"model": "text", "dtype": "text", "kv_dtype": "text", "labels": ["a whole number"]}
SETTINGS |= {"seed": "a whole number", "batch_size": "a whole number", "sampling": "an object"}
GEOMETRY = dict.fromkeys(
    ("num_layers", "num_heads", "head_dim", "rows_per_image"), "a whole number"
)
REPORT_SPEC = {
    "settings": SETTINGS | {"calibration": "text or null"},
    "geometry": {"schedule": "text"} | GEOMETRY,
    "device": "text",
    "versions": "an object of texts",
    "sample_names": ["text"],
    "definitions": "an object of texts",
    "reference": "an object",
    "cells": ["an object"],
}
CELL = {"label": "text", "policy": "text", "budget": "a fraction in (0, 1] or null"}
CELL |= {"status": "text"}
SIZES = "fraction dense_bytes planned_bytes allocated_bytes slot_bytes dense_slots".split()
REFERENCE = CELL | {
    "kv": dict.fromkeys(SIZES, "a number"),
    "time": {"steady_s_per_image": "a number"},
}
PER_IMAGE = {"psnr": ["a number or infinite"], "ssim": ["a number"], "kl": ["a number or infinite"]}
FIDELITY = dict.fromkeys(tables.METRICS, "a number") | {"kl": "a number or infinite"}
DONE = REFERENCE | {
    "kv": REFERENCE["kv"] | {"allocated_bytes": "a positive number"},  # its axis is logarithmic
    "fidelity": "an object",
    "samples_fidelity": PER_IMAGE,
    "live_tokens": [["a number"]],
    "used_slots": [["a number"]],
    "samples": "text",
}


def require(value: Any, spec: Any, place: str = "") -> None:
    """Raise `Damaged` if `value` is not as `spec` says; `place` is where it stands."""
    kind = {dict: "an object", list: "a list"}.get(type(spec), spec)
    if not KINDS[kind](value):
        raise Damaged(f"{place} is {value!r:.60}, it must be {kind}")
    if isinstance(spec, dict):
        for key, part in spec.items():
            inner = f"{place}.{key}" if place else key
            if key not in value:
                raise Damaged(f"{inner} is missing")
            require(value[key], part, inner)
    elif isinstance(spec, list):
        for i, item in enumerate(value):
            require(item, spec[0], f"{place}[{i}]")


def check_report(report: dict) -> Geometry:
    """The geometry of a report that has everything the page shows; `Damaged` says what is missing
    or of a wrong type."""
    require(report, REPORT_SPEC)
    fields = {key: report["geometry"][key] for key in REPORT_SPEC["geometry"]}
    try:
        geometry = Geometry(schedule=Schedule.parse(fields.pop("schedule")), **fields)
    except UserError as error:
        raise Damaged(str(error)) from None
    require(report["reference"], REFERENCE, "reference")
    scales, layers = geometry.schedule.num_scales, geometry.num_layers
    for i, cell in enumerate(report["cells"]):
        place = f"cells[{i}]"
        require(cell, CELL, place)
        if cell["status"] != "done":
            require(cell, {"reason": "text"}, place)
            continue
        require(cell, DONE, place)
        known = FIDELITY.keys() & cell["fidelity"]  # a sweep may be older than a metric
        require(cell["fidelity"], {key: FIDELITY[key] for key in known}, f"{place}.fidelity")
        for name in ("live_tokens", "used_slots"):
            if [len(row) for row in cell[name]] != [layers] * scales:
                raise Damaged(f"{place}.{name} is not {scales} lists of {layers} numbers")
    return geometry


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
        if any(len(cell["samples_fidelity"][name]) != len(full) for name in PER_IMAGE):
            raise Damaged(f"{len(full)} images of {cell['label']}, other counts in {REPORT}")


def _pictures(samples: dict[str, np.ndarray], name: str) -> np.ndarray:
    """uint8 [n, H, W, 3] of that name."""
    if name not in samples:
        raise Damaged(f"the array {name} is missing")
    found = samples[name]
    if found.dtype != np.uint8 or found.ndim != 4 or found.shape[-1] != 3 or not found.size:
        raise Damaged(f"{name} is {found.dtype} {found.shape}, no uint8 images are there")
    return found
