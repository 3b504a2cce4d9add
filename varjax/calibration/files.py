"""Calibration files: finding, reading and writing them.

Three kinds are read. HeatKV publishes removal orders: a JSON list with one list of [head, layer]
per source scale, least needed first. Our own files hold a JSON object (`Calibration`), or, of
learned tables, an npz archive: `seen`, uint8 [budgets, K - 1, L, N, F], and `about`, a JSON text.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from varjax.calibration.data import AXES, LARGEST, Calibration, cas, read_orders, scas
from varjax.core import arguments
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError, about, show
from varjax.core.sequence import SCALES, Schedule
from varjax.storage import npz, ordinary
from varjax.storage.atomic import new_file
from varjax.storage.manifest import parse_json
from varjax.storage.values import measured
from varjax.storage.values import path as path_

FORMAT_VERSION = 1
LARGEST_FILE = 256 * 2**20  # bytes
LARGEST_TABLES = 1024 * 2**20  # bytes unpacked
# in a checkpoint folder: used if no other file is given
BESIDE = BESIDE_CHECKPOINT, LEARNED = "calibration.json", "learned.npz"
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
    learned: str | os.PathLike | None = None,
) -> Calibration | None:
    """Finds the calibration that a policy plans with, if there is one.

    Args:
      policy: a `Policy`; the checkpoint folder is searched only if it uses a calibration.
      model: a model, or a `Geometry` alone.
      given: a calibration, its file, or None for what the policy reads in the checkpoint folder
        (`Policy.calibration_files`). A policy that reads two files takes the other one from there.
      guidance: the guidance of the run (`Sampling.guidance`); None accepts any.
      learned: a file of learned tables beside `given`.

    Raises:
      UserError: the calibration cannot be read, or it was made for a model of another shape, for
        other weights than those in the model's folder, or with other guidance.
    """
    found, held = None, set()
    for one in (one for one in (given, learned) if one is not None):
        calibration = checked(one, model, guidance)
        found, held = joined(found, calibration), held | parts(calibration)
    names = policy.calibration_files if policy.uses_calibration else ()
    if not held or held & {*names}:  # else it does not serve the policy, which will say so
        for name in (name for name in names if name not in held):
            if path := beside(_folder(model), name):
                found = joined(found, checked(path, model, guidance))
    return found


def parts(calibration: Calibration) -> set[str]:
    """Which of the files `BESIDE` a checkpoint the contents are of."""
    measured = not calibration.learned or calibration.beta is not None
    held = zip(BESIDE, (measured, bool(calibration.learned)), strict=True)
    return {name for name, is_held in held if is_held}


def _folder(model: Any) -> pathlib.Path | None:
    return None if isinstance(model, Geometry) else model.directory


def joined(first: Calibration | None, second: Calibration) -> Calibration:
    """What was measured, with the learned tables of the other one and both digests; the second if
    there is no first. `UserError` if both hold the same."""
    if first is None:
        return second
    if parts(first) & parts(second):
        what = "learned tables" if first.learned else "measurements"
        raise UserError(f"two calibrations hold {what}: give one of them")
    if first.learned:
        first, second = second, first
    digest = "+".join(filter(None, (first.digest, second.digest))) or None
    return dataclasses.replace(first, learned=second.learned, digest=digest)


def checked(given: Any, model: Any, guidance: float | str | None) -> Calibration:
    """A calibration, or that of a file, checked to fit the model and the guidance."""
    found, source = given, contextlib.nullcontext()
    if not isinstance(given, Calibration):
        geometry = model if isinstance(model, Geometry) else model.geometry
        found, source = load(path_("calibration", given), geometry), about(f"calibration {given}")
    if _folder(model) is not None:
        with source:
            found.check_origin(model_digest(model.metadata), guidance)
    return found


def beside(
    directory: str | os.PathLike | None, name: str = BESIDE_CHECKPOINT
) -> pathlib.Path | None:
    """The calibration file of a checkpoint folder, if it has one."""
    path = pathlib.Path(directory, name) if directory else None
    return path if path and path.is_file() else None


def model_digest(metadata: dict) -> str:
    """The SHA-256 of a checkpoint's sources, else of its parameter files: it tells models apart."""
    what = metadata.get("sources") or metadata.get("files") or metadata
    if isinstance(what, list):
        what = [{k: v for k, v in entry.items() if k != "file"} for entry in what]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def save(calibration: Calibration, path: str | os.PathLike) -> None:
    """Writes our calibration file: a JSON object with arrays as nested lists of 7 digits.

    Unknown entries are left out. "derived" is what follows from beta, for other readers.
    """
    content = {"format_version": FORMAT_VERSION}
    names = (f.name for f in dataclasses.fields(calibration))
    for name in (name for name in names if name not in ("learned", "digest")):
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


def save_learned(calibration: Calibration, path: str | os.PathLike, notes: Mapping) -> None:
    """Writes learned tables. notes: what else is told of them, as JSON has it."""
    told = {name: getattr(calibration, name) for name in _SCALARS}
    told = {name: _plain(value) for name, value in told.items() if value is not None}
    tables = {float(budget): table for budget, table in sorted(calibration.learned.items())}
    said = {"format_version": FORMAT_VERSION, **told, "budgets": list(tables), **notes}
    with new_file(path) as file:
        text = np.array(json.dumps(said, allow_nan=False))
        np.savez_compressed(file, seen=np.stack([*tables.values()]), about=text)


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
            packed = data[:2] == b"PK"  # as npz archives begin
            content = None if packed else parse_json(data.decode("utf-8"))
        except OSError as error:
            raise UserError(f"cannot read the file: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"it is not JSON: {error}") from None
        digest = hashlib.sha256(data).hexdigest()
        if packed:
            arrays = npz.load(path, ("about", "seen"), LARGEST_TABLES)
            return _from_arrays(arrays, geometry, digest)
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
    if "schedule" in scalars and geometry.kind == SCALES:
        scalars["schedule"] = Schedule.parse(scalars["schedule"])
    found = Calibration(**scalars, digest=digest)
    found.check(geometry)  # before the arrays: "another model" is the more useful complaint
    arrays = {n: measured(n, given[n], LARGEST).astype(np.float64) for n in AXES if n in given}
    if "orders" in given:
        arrays["orders"] = read_orders(given["orders"], geometry)
    complete = dataclasses.replace(found, **arrays)
    complete.check(geometry)
    return complete


def _from_arrays(arrays: Mapping[str, np.ndarray], geometry: Geometry, digest: str) -> Calibration:
    seen, content = arrays.get("seen"), None
    if seen is not None and seen.ndim and "about" in arrays and not arrays["about"].ndim:
        with contextlib.suppress(ValueError):
            content = parse_json(str(arrays["about"]))
    if not isinstance(content, dict):
        raise UserError(
            "it holds no learned tables, which are arrays `seen` and `about`, a text of JSON"
        )
    found, budgets = _from_object(content, geometry, digest), content.get("budgets")
    if not isinstance(budgets, list) or not budgets or len(budgets) != len(seen):
        raise UserError(f"budgets are {show(budgets)}: list one for each of {len(seen)} tables")
    for budget in budgets:
        arguments.number("a learned table's budget", budget, 0, 1, above=True)
    if len(set(budgets)) != len(budgets):
        raise UserError(f"budgets are {show(budgets)}: each has one table")
    tables = dict(zip(map(float, budgets), seen, strict=True))
    complete = dataclasses.replace(found, learned=tables)
    complete.check(geometry)
    return complete
