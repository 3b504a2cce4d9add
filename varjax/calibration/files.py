"""Calibration files: finding, reading and writing them.

Two kinds are read. HeatKV publishes removal orders: a JSON list with one list of [head, layer] per
source scale, least needed first. Our own files hold a JSON object (`Calibration`).
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np

from varjax.calibration.data import AXES, LARGEST, Calibration, cas, read_orders, scas
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError, about, show
from varjax.core.sequence import Schedule
from varjax.storage import ordinary
from varjax.storage.atomic import new_file
from varjax.storage.manifest import parse_json
from varjax.storage.values import measured
from varjax.storage.values import path as path_

FORMAT_VERSION = 1
LARGEST_FILE = 256 * 2**20  # bytes
BESIDE_CHECKPOINT = "calibration.json"  # in a checkpoint folder: used if no other file is given
_SCALARS = {
    "model": str,
    "model_digest": str,
    "schedule": str,
    "num_layers": int,
    "num_heads": int,
    "guidance": (int, float, str),
    "num_samples": int,
}


def find(
    policy: Any,
    model: Any,
    given: Calibration | str | os.PathLike | None = None,
    guidance: float | str | None = None,
) -> Calibration | None:
    """Finds the calibration that a policy plans with, if there is one.

    Args:
      policy: a `Policy`; the checkpoint folder is searched only if it uses a calibration.
      model: a model, or a `Geometry` alone.
      given: a calibration, its file, or None for `calibration.json` in the checkpoint folder.
      guidance: the guidance of the run (`Sampling.guidance`); None accepts any.

    Raises:
      UserError: the calibration cannot be read, or it was made for a model of another shape, for
        other weights than those in the model's folder, or with other guidance.
    """
    geometry = model if isinstance(model, Geometry) else model.geometry
    directory = None if model is geometry else model.directory
    if given is None and policy.uses_calibration:
        given = beside(directory)
    if given is None:
        return None
    found, source = given, contextlib.nullcontext()
    if not isinstance(given, Calibration):
        found, source = load(path_("calibration", given), geometry), about(f"calibration {given}")
    if directory is not None:
        with source:
            found.check_origin(model_digest(model.metadata), guidance)
    return found


def beside(directory: str | os.PathLike | None) -> pathlib.Path | None:
    """The calibration file of a checkpoint folder, if it has one."""
    path = pathlib.Path(directory, BESIDE_CHECKPOINT) if directory else None
    return path if path and path.is_file() else None


def model_digest(metadata: dict) -> str:
    """The SHA-256 of a checkpoint's sources, else of its parameter files: it tells models apart."""
    what = metadata.get("sources") or metadata.get("files") or metadata
    if isinstance(what, list):
        what = [{k: v for k, v in entry.items() if k != "file"} for entry in what]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def save(calibration: Calibration, path: str | os.PathLike) -> None:
    """Writes our calibration file: a JSON object with arrays as nested lists of 7 digits.

    Unknown entries are left out. Under "derived" the file holds what follows from beta, for other
    readers.
    """
    content = {"format_version": FORMAT_VERSION}
    for name in (f.name for f in dataclasses.fields(calibration) if f.name != "digest"):
        if (value := getattr(calibration, name)) is not None:
            content[name] = _plain(value)
    if calibration.beta is not None and calibration.schedule is not None:
        sinks = max(0, min(3, calibration.schedule.num_scales - 2))
        content["derived"] = {
            "scas": _plain(scas(calibration.beta, 0)),
            "cas": _plain(cas(calibration.beta, sinks)),
            "cas_sinks": sinks,
            "attention_density": _plain(calibration.attention_density),
        }
    with new_file(path) as file:
        file.write(json.dumps(content, allow_nan=False).encode())


def _plain(value: object) -> object:
    """Turns a field of a calibration into what JSON can hold; NaN becomes None."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        rounded = np.vectorize(lambda x: float(f"{x:.7g}"), otypes=[object])(value)
        return np.where(np.isnan(value), None, rounded).tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, Schedule) else value


def load(path: str | os.PathLike, geometry: Geometry) -> Calibration:
    """Reads either kind of file for a model.

    Raises:
      UserError: the file is unreadable, malformed (the message names list and entry), or for
        another model.
    """
    with about(f"calibration {path}"):
        try:
            data = ordinary.read_file(path, LARGEST_FILE)
            content = parse_json(data.decode("utf-8"))
        except OSError as error:
            raise UserError(f"cannot read the file: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"it is not JSON: {error}") from None
        digest = hashlib.sha256(data).hexdigest()
        if isinstance(content, list):
            return Calibration(orders=read_orders(content, geometry), digest=digest)
        if isinstance(content, dict):
            return _from_object(content, geometry, digest)
        raise UserError(
            "expected a list of removal orders or an object of measurements, found "
            f"{type(content).__name__}"
        )


def _from_object(content: dict, geometry: Geometry, digest: str) -> Calibration:
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise UserError(
            f"format_version is {version!r}, this version of varjax reads {FORMAT_VERSION}"
        )
    given = {k: v for k, v in content.items() if v is not None}
    scalars = {name: given[name] for name in _SCALARS if name in given}
    for name, value in scalars.items():
        if isinstance(value, bool) or not isinstance(value, _SCALARS[name]):
            raise UserError(f"{name} is {show(value)}: the wrong type")
    if "schedule" in scalars:
        scalars["schedule"] = Schedule.parse(scalars["schedule"])
    found = Calibration(**scalars, digest=digest)
    found.check(geometry)  # before the arrays: "another model" is the more useful complaint
    arrays = {n: measured(n, given[n], LARGEST).astype(np.float64) for n in AXES if n in given}
    if "orders" in given:
        arrays["orders"] = read_orders(given["orders"], geometry)
    complete = dataclasses.replace(found, **arrays)
    complete.check(geometry)
    return complete
