"""Reading a sweep's files. Everything that a report shows must be there with the right type, size
and range, which `sweep.schema.json` declares; else the message names file and place."""

import json
import math
import pathlib

import jsonschema
import numpy as np

from experiments.batch_files import Damaged
from experiments.geometry import read_order
from experiments.sweep import tables
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.storage import npz, ordinary
from varjax.storage.manifest import parse_json

REPORT, SAMPLES = "sweep.json", "samples.npz"
SCHEMA = pathlib.Path(__file__).with_name("sweep.schema.json")
LARGEST_REPORT = 2**26  # bytes of sweep.json
LARGEST_SIDE = 16383  # pixels; the most that WebP takes


def read_sweep(folder: pathlib.Path) -> tuple[dict, dict[str, np.ndarray], Geometry]:
    """Return (content of sweep.json, arrays of samples.npz, the model's geometry) of a sweep.
    `UserError` if it is not finished, was written by another version, or has damaged files."""
    name = REPORT
    try:
        report = parse_json(ordinary.read_file(folder / REPORT, LARGEST_REPORT).decode("utf-8"))
        json.dumps(report, ensure_ascii=False).encode()  # no page holds half of a surrogate pair
        version = report.get("format_version") if isinstance(report, dict) else None
        if version != tables.FORMAT_VERSION:
            raise Damaged(
                f"format_version is {version!r:.80}, varjax reads {tables.FORMAT_VERSION} now"
            )
        geometry = check_report(report)
        name = SAMPLES
        done = [cell["samples"] for cell in report["cells"] if cell["status"] == "done"]
        maps = [f"{tables.KEPT}/{key}" for key in done]
        samples = npz.load(folder / SAMPLES, {tables.FULL, *done, *maps})
        check_samples(report, samples)
    except OSError as error:
        raise UserError(
            f"--sweep={folder} is no finished sweep ({error.strerror}: {name}): give the folder "
            "that `python -m experiments.sweep` has written"
        ) from None
    except (Damaged, ValueError) as error:  # `UserError` is one
        said = " ".join(str(error).split()) or type(error).__name__
        said = "".join(c if c.isprintable() else "?" for c in said)  # a file may hold any names
        raise UserError(
            f"--sweep={folder}: its files are damaged: {name}: {said:.300}: run the sweep again"
        ) from None
    return report, samples, geometry


def check_report(report: dict) -> Geometry:
    """Return the geometry of a report that has everything the page shows. `Damaged` says what is
    missing or has a wrong type."""
    kind = jsonschema.Draft202012Validator
    types = kind.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    types = types.redefine("number", lambda _, v: type(v) in (int, float) and math.isfinite(v))
    checker = jsonschema.validators.extend(kind, type_checker=types)
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    if error := jsonschema.exceptions.best_match(checker(schema).iter_errors(report)):
        raise Damaged(f"{error.json_path.removeprefix('$.')}: {error.message}")
    said = report["geometry"]
    sizes = ("num_layers", "num_heads", "head_dim", "rows_per_image")
    try:
        geometry = Geometry(
            schedule=read_order(said["schedule"]),
            queries_per_head=said.get("queries_per_head", 1),
            **{name: said[name] for name in sizes},
        )
    except UserError as error:
        raise Damaged(f"geometry: {error}") from None
    for i, cell in enumerate(report["cells"]):
        for name in ("live_tokens", "used_slots") if cell["status"] == "done" else ():
            scales = geometry.schedule.num_scales or len(cell["live_tokens"])  # of tokens: stages
            if [len(counts) for counts in cell[name]] != [geometry.num_layers] * scales:
                raise Damaged(
                    f"cells[{i}].{name} is not {scales} lists of {geometry.num_layers} numbers"
                )
    return geometry


def check_samples(report: dict, samples: dict[str, np.ndarray]) -> None:
    """Raise `Damaged` if a cell lacks pictures, uint8 [n, H, W, 3], or one its name or numbers."""
    done = [cell for cell in report["cells"] if cell["status"] == "done"]
    for name in (tables.FULL, *(cell["samples"] for cell in done)):
        if name not in samples:
            raise Damaged(f"the array {name} is missing")
        found, full = samples[name], samples[tables.FULL]
        if found.dtype != np.uint8 or found.ndim != 4 or found.shape[-1] != 3 or not found.size:
            raise Damaged(f"{name} is {found.dtype} {found.shape}, no uint8 images are there")
        kept = samples.get(f"{tables.KEPT}/{name}")
        if kept is not None and not _is_picture(kept):
            raise Damaged(f"{tables.KEPT}/{name} is {kept.dtype} {kept.shape}, no picture")
        if max(found.shape[1:3]) > LARGEST_SIDE:
            raise Damaged(f"{name} has shape {found.shape}: sides are at most {LARGEST_SIDE}")
        if found.shape != full.shape:
            raise Damaged(f"{name} has shape {found.shape}, {full.shape} is expected")
    if len(report["sample_names"]) != len(full):
        raise Damaged(f"{len(full)} images, but {len(report['sample_names'])} names in {REPORT}")
    for cell in done:
        if any(len(numbers) != len(full) for numbers in cell["samples_fidelity"].values()):
            raise Damaged(f"{len(full)} images of {cell['label']}, other counts in {REPORT}")


def _is_picture(array: np.ndarray) -> bool:
    rgb = array.dtype == np.uint8 and array.ndim == 3 and array.shape[-1] == 3
    return rgb and 0 < array.size and max(array.shape) <= LARGEST_SIDE
