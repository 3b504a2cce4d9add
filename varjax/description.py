"""`model.json`: the description of a checkpoint, written last and read first."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from varjax.errors import UserError
from varjax.models import parameters, registry

NAME = "model.json"
FORMAT_VERSION = 1
REQUIRED = {"family": str, "transformer": dict, "codec": dict, "schedule": list}


def compose(family: str, transformer, codec, arrays: Mapping[str, np.ndarray]) -> dict:
    """The entries that follow from the two configurations and the arrays."""
    registry.family(family)
    floating = {str(a.dtype) for a in arrays.values() if parameters.is_floating(a.dtype)}
    content = {
        "format_version": FORMAT_VERSION,
        "family": family,
        "transformer": transformer.to_published(),
        "codec": codec.to_published(),
        "schedule": [list(pair) for pair in transformer.schedule.maps],
        "dtype": ", ".join(sorted(floating)),
        "parameters": sum(int(a.size) for a in arrays.values()),
    }
    if hasattr(transformer, "num_classes"):
        content["num_classes"] = transformer.num_classes
    return content


def write(folder: Path, content: Mapping) -> None:
    """Write `model.json` with the format version and family first."""
    first = {name: content[name] for name in ("format_version", "family")}
    text = json.dumps({**first, **content}, indent=1, ensure_ascii=False)
    (folder / NAME).write_text(text + "\n", encoding="utf-8")


def read(folder: Path) -> dict:
    """Read and check `folder/model.json`.

    Raises:
      UserError: missing, not JSON, another format version, unknown family or missing entries.
    """
    file = folder / NAME
    content = _parse(folder, file)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file} has format version {version!r}, this varjax reads version {FORMAT_VERSION}:"
            " convert the PyTorch files again with `python -m ported_weights`"
        )
    for name, kind in REQUIRED.items():
        if not isinstance(content.get(name), kind):
            raise UserError(f"{file} is damaged: entry {name!r} is missing or malformed")
    if content["family"] not in registry.FAMILIES:
        known = ", ".join(registry.FAMILIES)
        raise UserError(f"{file}: unknown family {content['family']!r}, known are {known}")
    _check_schedule(file, content)
    return content


def _parse(folder: Path, file: Path) -> dict:
    if not folder.exists():
        raise UserError(f"there is no checkpoint folder {folder}")
    if not file.is_file():
        raise UserError(
            f"{folder} is not a varjax checkpoint: it has no {NAME}; PyTorch weights are converted"
            " with `python -m ported_weights`"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it must hold a JSON object")
    return content


def _check_schedule(file: Path, content: Mapping) -> None:
    """The entry `schedule` repeats the configuration for readers; both must agree."""
    part = registry.family(content["family"]).transformer
    maps = [list(pair) for pair in part.read(content["transformer"]).schedule.maps]
    if content["schedule"] != maps:
        raise UserError(
            f"{file} is inconsistent: schedule {content['schedule']} but the transformer's"
            f" configuration says {maps}"
        )


# --- the files beside it --------------------------------------------------------------------------


def file_records(folder: Path) -> dict[str, dict]:
    """{relative path: size and CRC-32} of all files below `folder`."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return {f.relative_to(folder).as_posix(): _record(f) for f in files}


def _record(file: Path) -> dict:
    """Orbax itself would not notice all flipped bits: its chunks of values carry no checksum."""
    value = 0
    with file.open("rb") as stream:
        while data := stream.read(2**24):
            value = zlib.crc32(data, value)
    return {"size": file.stat().st_size, "crc32": f"{value:08x}"}


def check_files(folder: Path, content: Mapping) -> None:
    """Compare the parameter files with what was recorded when they were written.

    Raises:
      UserError: listing every missing, truncated or altered file.
    """
    problems = []
    for name, record in content.get("files", {}).items():
        file = folder / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != record["size"]:
            problems.append(f"{name} has {file.stat().st_size} bytes instead of {record['size']}")
        elif _record(file) != record:
            problems.append(f"{name} has been altered")
    if problems or not folder.is_dir():
        listed = "; ".join(problems) or "the folder is missing"
        raise UserError(
            f"the parameters in {folder} are damaged or incomplete: {listed}; copy them again"
        )
