"""Reading a sweep's files. Everything that a report shows must be there with the right type, size
and range; else the message names the file and the place in it."""

import json
import pathlib

import numpy as np

from experiments.report.json_values import Damaged, check
from experiments.sweep import tables
from varjax import sequence
from varjax.arguments import LARGEST_BATCH
from varjax.cache.allocation import Geometry
from varjax.errors import UserError
from varjax.storage import npz, ordinary
from varjax.storage.manifest import parse_json

REPORT, SAMPLES = "sweep.json", "samples.npz"
LARGEST_REPORT = 2**26  # bytes of sweep.json
LARGEST_SIDE = 16383  # pixels; the most that WebP takes

# --- what must be there; other keys are ignored ---

SETTINGS = {
    "model": "text",
    "dtype": "text",
    "kv_dtype": "text",
    "labels": ["a whole number"],
    "seed": "a whole number",
    "batch_size": f"a whole number from 1 to {LARGEST_BATCH}",
    "calibration": "text or null",
    "sampling": "an object",
}
GEOMETRY = dict.fromkeys(
    ("num_layers", "num_heads", "head_dim", "rows_per_image"), "a whole number"
)
REPORT_SPEC = {
    "settings": SETTINGS,
    "geometry": {"schedule": "text"} | GEOMETRY,
    "device": "text",
    "versions": "an object of texts",
    "sample_names": ["text"],
    "definitions": "an object of texts",
    "reference": "an object",
    "cells": ["an object"],
}
NAMES = {
    "label": "text",
    "policy": "text",
    "budget": "a fraction in (0, 1] or null",
    "status": "done, skipped or infeasible",
}
SIZES = "fraction dense_bytes planned_bytes slot_bytes dense_slots".split()
MEASURED = {
    "kv": dict.fromkeys(SIZES, "a number of at least 0") | {"allocated_bytes": "a positive number"},
    "time": {"steady_s_per_image": "seconds from 1e-9 to 1e9"},
}
IN_USE = dict.fromkeys(("live_tokens", "used_slots"), [["a number of at least 0"]])
SHOWN_PER_IMAGE = ("psnr", "ssim", "kl")
ENDS = ("", "_low", "_high", "_difference", "_difference_low", "_difference_high")


def read(folder: pathlib.Path) -> tuple[dict, dict[str, np.ndarray], Geometry]:
    """Return (content of sweep.json, arrays of samples.npz, the model's geometry) of a sweep.
    `UserError` if it is not finished, was written by another version, or has damaged files."""
    try:
        report = _load_json(folder)
    except OSError as error:
        raise UserError(
            f"--sweep={folder} is no finished sweep ({error.strerror}: {REPORT}): give the folder "
            "that `python -m experiments.sweep` has written"
        ) from None
    except (Damaged, ValueError) as error:
        raise _damaged(folder, REPORT, error) from None
    version = report.get("format_version") if isinstance(report, dict) else None
    if version != tables.FORMAT_VERSION:
        raise UserError(
            f"--sweep={folder}: {REPORT}: format_version is {version!r:.80}, this version of "
            f"varjax reads {tables.FORMAT_VERSION}: run the sweep again"
        )
    name = REPORT
    try:
        geometry = check_report(report)
        name = SAMPLES
        done = [cell["samples"] for cell in report["cells"] if cell["status"] == "done"]
        samples = npz.load(folder / SAMPLES, {tables.FULL, *done})
        check_samples(report, samples)
    except (Damaged, UserError) as error:
        raise _damaged(folder, name, error) from None
    return report, samples, geometry


def _load_json(folder: pathlib.Path) -> object:
    content = parse_json(ordinary.read(folder / REPORT, LARGEST_REPORT).decode("utf-8"))
    json.dumps(content, ensure_ascii=False).encode()  # no page can hold half of a surrogate pair
    return content


def _damaged(folder: pathlib.Path, name: str, reason: Exception) -> UserError:
    said = " ".join(str(reason).split()) or type(reason).__name__
    said = "".join(c if c.isprintable() else "?" for c in said)  # a file may hold any names
    return UserError(
        f"--sweep={folder}: its files are damaged: {name}: {said:.300}: run the sweep again"
    )


# --- a finished sweep ---


def check_report(report: dict) -> Geometry:
    """Return the geometry of a report that has everything the page shows. `Damaged` says what is
    missing or has a wrong type."""
    check(report, REPORT_SPEC)
    said = report["geometry"]
    try:
        geometry = Geometry(
            schedule=sequence.parse(said["schedule"]),
            num_layers=said["num_layers"],
            num_heads=said["num_heads"],
            head_dim=said["head_dim"],
            rows_per_image=said["rows_per_image"],
            queries_per_head=said.get("queries_per_head", 1),
        )
    except UserError as error:
        raise Damaged(f"geometry: {error}") from None
    check(report["reference"], NAMES | MEASURED, "reference")
    check_fidelity(report["reference"], "reference")
    for i, cell in enumerate(report["cells"]):
        place = f"cells[{i}]"
        check(cell, NAMES, place)
        if cell["status"] == "done":
            check_cell(cell, geometry, place)
        else:
            check(cell, {"reason": "text"}, place)
    return geometry


def check_cell(cell: dict, geometry: Geometry, place: str) -> None:
    """Raise `Damaged` unless a cell that has run has its sizes, times, tokens and fidelity."""
    check(cell, {"samples": "text", "samples_fidelity": "an object"} | MEASURED | IN_USE, place)
    layers = geometry.num_layers
    scales = geometry.schedule.num_stages or len(cell["live_tokens"])
    for name in IN_USE:
        if [len(counts) for counts in cell[name]] != [layers] * scales:
            raise Damaged(f"{place}.{name} is not {scales} lists of {layers} numbers")
    numbers = cell["samples_fidelity"]
    per_image = dict.fromkeys(_shown_per_image(numbers), ["a number or infinite"])
    check(numbers, per_image, f"{place}.samples_fidelity")
    check_fidelity(cell, place)


def _shown_per_image(numbers: dict) -> list[str]:
    """Return the metrics that a page shows of every picture."""
    return [*SHOWN_PER_IMAGE, *(name for name in tables.JUDGED if name in numbers)]


def check_fidelity(row: dict, place: str) -> None:
    """Raise `Damaged` unless means and intervals are numbers; older sweeps may lack some."""
    found, place = row.get("fidelity", {}), f"{place}.fidelity"
    check(found, "an object", place)
    names = (f"{key}{end}" for key in tables.METRICS for end in ENDS)
    check(found, {name: "a number or infinite" for name in names if name in found}, place)


def check_samples(report: dict, samples: dict[str, np.ndarray]) -> None:
    """Raise `Damaged` if a cell lacks pictures, or a picture its name or its numbers."""
    full = pictures(samples, tables.FULL)
    if len(report["sample_names"]) != len(full):
        raise Damaged(f"{len(full)} images, but {len(report['sample_names'])} names in {REPORT}")
    for cell in report["cells"]:
        if cell["status"] != "done":
            continue
        found = pictures(samples, cell["samples"])
        if found.shape != full.shape:
            raise Damaged(f"{cell['samples']} has shape {found.shape}, {full.shape} is expected")
        numbers = cell["samples_fidelity"]
        if any(len(numbers[name]) != len(full) for name in _shown_per_image(numbers)):
            raise Damaged(f"{len(full)} images of {cell['label']}, other counts in {REPORT}")


def pictures(samples: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the pictures of that name, uint8 [n, H, W, 3]; `Damaged` if they are anything else."""
    if name not in samples:
        raise Damaged(f"the array {name} is missing")
    found = samples[name]
    if found.dtype != np.uint8 or found.ndim != 4 or found.shape[-1] != 3 or not found.size:
        raise Damaged(f"{name} is {found.dtype} {found.shape}, no uint8 images are there")
    if max(found.shape[1:3]) > LARGEST_SIDE:
        raise Damaged(f"{name} has shape {found.shape}: sides are at most {LARGEST_SIDE}")
    return found
