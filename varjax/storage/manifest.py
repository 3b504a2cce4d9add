"""Descriptions of checkpoints, written last and read first.

`model.json` describes the parts of a family, which share a tree; a part with a folder of its own is
described there by NAME.json, such as `text_encoder.json`.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from varjax.errors import UserError, about, some
from varjax.nn import parameters
from varjax.nn.families import Family, Part
from varjax.nn.published import Configuration, TransformerConfig
from varjax.sampling import Sampling
from varjax.storage import ordinary
from varjax.storage.atomic import write_text

NAME = "model.json"
FORMAT_VERSION = 1
DEEPEST_JSON = 64
LARGEST_JSON = 16 * 2**20  # bytes
_TOO_DEEP = f"lists and objects are nested more than {DEEPEST_JSON} deep"


def compose(
    family: Family, configs: Mapping[str, Configuration], arrays: Mapping[str, np.ndarray]
) -> dict:
    """The entries of `model.json` that follow from {part: configuration} and the arrays."""
    transformer = configs["transformer"]
    content = {
        "format_version": FORMAT_VERSION,
        "family": family.name,
        **{name: configs[name].to_published() for name in family.tree},
        "schedule": _maps(transformer),
        **_totals(arrays),
    }
    if transformer.num_classes:
        content["num_classes"] = transformer.num_classes
    return content


def compose_part(part: Part, config: Configuration, arrays: Mapping[str, np.ndarray]) -> dict:
    """The entries of NAME.json, for a part with a folder of its own, that follow from its
    configuration and its arrays."""
    return {
        "format_version": FORMAT_VERSION,
        "kind": _kind(part),
        "config": config.to_published(),
        **_totals(arrays),
    }


def _maps(transformer: TransformerConfig) -> list[list[int]]:
    """The entry "schedule": it repeats the configuration, for readers."""
    return [list(pair) for pair in transformer.token_maps]


def _totals(arrays: Mapping[str, np.ndarray]) -> dict:
    floating = {str(a.dtype) for a in arrays.values() if parameters.is_floating(a.dtype)}
    count = sum(int(a.size) for a in arrays.values())
    return {"dtype": ", ".join(sorted(floating)), "parameters": count}


def _kind(part: Part) -> str:
    return part.name.lower()


def write(folder: Path, content: Mapping, name: str = NAME) -> None:
    """Write a description. The entries that say what it describes come first."""
    first = {n: content[n] for n in ("format_version", "family", "kind") if n in content}
    text = json.dumps({**first, **content}, indent=1, ensure_ascii=False)
    write_text(folder / name, text + "\n")


def read(folder: Path, families: Mapping[str, Family]) -> dict:
    """Read `folder/model.json` of a model of one of these families, by name. `UserError` unless it
    is there, of this version and consistent."""
    if not folder.exists():
        raise UserError(f"there is no checkpoint folder {folder}")
    file = folder / NAME
    if not file.is_file():
        raise UserError(
            f"{folder} is not a varjax checkpoint: it has no {NAME}; PyTorch weights are converted"
            " with `python -m ported_weights`"
        )
    content = _json_object(file)
    version = content.get("format_version")
    if isinstance(version, bool) or version != FORMAT_VERSION:
        raise UserError(
            f"{file} has format version {version!r:.60}, this varjax reads version"
            f" {FORMAT_VERSION}: convert the PyTorch files again with `python -m ported_weights`"
        )
    _require(file, content, {"family": str})
    if content["family"] not in families:
        known = ", ".join(families)
        raise UserError(f"{file}: unknown family {content['family']!r:.60}, known are {known}")
    family = families[content["family"]]
    _require(file, content, {**dict.fromkeys(family.tree, dict), "schedule": list})
    configs = configurations(file, content, family)
    if content["schedule"] != (maps := _maps(configs["transformer"])):
        raise UserError(
            f"{file} is inconsistent: schedule {str(content['schedule'])[:200]} but the"
            f" transformer's configuration says {str(maps)[:200]}"
        )
    check_entries(file, family, content, configs)
    return content


def read_part(folder: Path, name: str, part: Part) -> dict:
    """Read `folder/NAME.json`, the description of a part with a folder of its own. `UserError` as
    for `read`."""
    file, advice = folder / f"{name}.json", "convert it with `python -m ported_weights`"
    if not file.is_file():
        what, missing = name.replace("_", " "), f"{folder.name}/{file.name}"
        if folder.is_dir():
            raise UserError(f"{folder} is no {what} (no {file.name}): {advice}")
        raise UserError(f"there is no {what} in {folder.parent} (no {missing}): {advice}")
    content, kind = _json_object(file), _kind(part)
    version, given = content.get("format_version"), content.get("kind")
    if isinstance(version, bool) or (version, given) != (FORMAT_VERSION, kind):
        raise UserError(
            f"{file} describes {given!r:.60} in format version {version!r:.60}, this varjax reads"
            f" {kind!r} in version {FORMAT_VERSION}: {advice}"
        )
    _require(file, content, {"config": dict, "files": dict})
    configuration(file, content, "config", part)
    check_records(file, content["files"])
    return content


def _require(file: Path, content: Mapping, kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            raise UserError(f"{file} is damaged: entry {name!r} is missing or malformed")


def read_json(path: str | os.PathLike):
    """The value of a JSON file; `UserError` if there is no such file or it is not JSON."""
    try:
        return parse_json(ordinary.read(path, LARGEST_JSON).decode("utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read {path} as JSON: {reason:.200}") from error


def _json_object(file: Path) -> dict:
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it must hold a JSON object")
    return content


def parse_json(text: str):
    """The value of a JSON text; `ValueError` also if it is nested too deeply, or an object has a
    key twice."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(DEEPEST_JSON):
        level = [inner for outer in level for inner in _inner(outer)]
    if level:
        raise ValueError(_TOO_DEEP)
    return value


def _object(pairs: list[tuple[str, object]]) -> dict:
    """An object, of which Python would keep the last of two values under one key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!a:.60} is there twice")
    return found


def _inner(value) -> list:
    """What a list or object holds."""
    return list(value.values()) if isinstance(value, dict) else value if type(value) is list else []


# --- what the entries have to be ------------------------------------------------------------------


def configurations(where: str | Path, content: Mapping, family: Family) -> dict[str, Configuration]:
    """{part: configuration} of a `model.json`; `UserError` names `where` and the entry."""
    return {name: configuration(where, content, name, part) for name, part in family.tree.items()}


def configuration(where: str | Path, content: Mapping, entry: str, part: Part) -> Configuration:
    """The configuration of a part, from an entry of a description; errors as `configurations`."""
    with about(f"{where}, entry {entry!r}"):
        return part.read(content[entry])


def check_entries(
    where: str | Path, family: Family, content: Mapping, configs: Mapping[str, Configuration]
) -> None:
    """Raise `UserError` unless the parts of a `model.json` fit each other, and the entries
    class_names, sampling and files, where they are there, fit the parts. where: the file or folder,
    for messages. configs: {part: configuration}.
    """
    with about(f"{where} is inconsistent"):
        family.check(configs)
    transformer = configs["transformer"]
    if "class_names" in content:
        _check_class_names(where, content["class_names"], transformer.num_classes)
    if "sampling" in content:
        with about(f"{where}, entry 'sampling'"):
            transformer.check_sampling(Sampling.recommended(content["sampling"]))
    if "files" in content:
        check_records(where, content["files"])


def _check_class_names(where, names, count: int) -> None:
    if not isinstance(names, list) or not all(map(is_text, names)):
        problem = f"is {names!r:.60}: it must be a list of {count} texts, one for each class"
    elif len(names) != count:
        problem = f"has {len(names)} names, the model has {count} classes: give one for each"
    else:
        return
    raise UserError(f"{where}, entry 'class_names' {problem}, or leave it out")


def is_text(value) -> bool:
    """Whether this is a text that can be shown and written. A text with half of a surrogate pair
    cannot."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def check_records(where, records) -> None:
    """Raise `UserError` unless these are file names with size and crc32."""
    if not isinstance(records, dict):
        raise UserError(
            f"{where}, entry 'files' is {records!r:.60}: it must hold file names with size and"
            " crc32; copy or convert the checkpoint again"
        )
    for name, record in records.items():
        size, crc = (record.get(k) if isinstance(record, dict) else None for k in ("size", "crc32"))
        path = PurePosixPath(name)
        inside = path.parts and not path.is_absolute() and ".." not in path.parts
        is_crc = isinstance(crc, str) and re.fullmatch(r"[0-9a-f]{8}", crc)
        if not (inside and type(size) is int and size >= 0 and is_crc):
            raise UserError(
                f"{where}, entry 'files': {name!r:.60} has the record {record!r:.60}; needed are a"
                " path inside params, its size and crc32 (8 hexadecimal digits)"
            )


# --- the files beside it --------------------------------------------------------------------------


def file_records(folder: Path) -> dict[str, dict]:
    """{relative path: size and CRC-32} of all files below `folder`."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return {f.relative_to(folder).as_posix(): record(f) for f in files}


def record(file: Path) -> dict:
    """Size and CRC-32 of a file."""
    return {"size": file.stat().st_size, "crc32": _crc32(file)}


def _crc32(file: Path) -> str:
    """CRC-32 of a file, in hexadecimal. Orbax itself would not notice all flipped bits: its chunks
    of values carry no checksum."""
    value = 0
    with ordinary.opened(file) as stream:
        while data := stream.read(2**24):
            value = zlib.crc32(data, value)
    return f"{value:08x}"


def check_files(folder: Path, content: Mapping, advice: str = "copy them again") -> None:
    """Raise `UserError`, naming every parameter file that is missing or was altered."""
    problems = [_problem(folder / name, name, x) for name, x in content.get("files", {}).items()]
    if any(problems) or not folder.is_dir():
        listed = some(filter(None, problems), between="; ") or "the folder is missing"
        raise UserError(f"the parameters in {folder} are damaged or incomplete: {listed}; {advice}")


def _problem(file: Path, name: str, record: Mapping) -> str | None:
    try:
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != record["size"]:
            return f"{name} has {size} bytes instead of {record['size']}"
        return None if _crc32(file) == record["crc32"] else f"{name} has been altered"
    except (OSError, ValueError) as error:  # as a name that is too long, or a NUL in it
        return f"{name!r:.60} cannot be read ({error!s:.80})"
