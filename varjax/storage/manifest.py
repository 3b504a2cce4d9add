"""Descriptions of checkpoints, written last and read first.

`model.json` describes the parts of a family, which share a tree; a part with a folder of its own is
described there by NAME.json, such as `text_encoder.json`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np

from varjax.core.errors import UserError, about, nearest, show
from varjax.core.sampling import LISTS, Sampling
from varjax.storage import arrays as stored
from varjax.storage import checksums, ordinary
from varjax.storage.atomic import write_text
from varjax.storage.families import Family, Part
from varjax.storage.published import Configuration

NAME = "model.json"
FORMAT_VERSION = 1
_OPTIONAL = {"sources": list, "beside": dict, "own_folders": dict}  # a description may lack them
DEEPEST_JSON = 64
RECOMMENDABLE = (*LISTS, "cfg_interval", "top_k", "top_p", "more_smooth")  # sampling
LARGEST_JSON = 16 * 2**20  # bytes


def compose(
    family: Family, configs: Mapping[str, Configuration], arrays: Mapping[str, np.ndarray]
) -> dict:
    """The entries of `model.json` that follow from {part: configuration} and the arrays."""
    transformer = configs["transformer"]
    content = {
        "format_version": FORMAT_VERSION,
        "family": family.name,
        **{name: configs[name].to_published() for name in family.tree},
        "schedule": list(map(list, transformer.token_maps)),  # for readers
        **stored.totals(arrays),
    }
    if transformer.num_classes:
        content["num_classes"] = transformer.num_classes
    return content


def write_manifest(folder: Path, content: Mapping, name: str = NAME) -> None:
    """Writes a description. Its format and kind come first."""
    first = {n: content[n] for n in ("format_version", "family", "kind") if n in content}
    text = json.dumps({**first, **content}, indent=1, ensure_ascii=False)
    write_text(folder / name, text + "\n")


def read_manifest(folder: Path, families: Mapping[str, Family]) -> dict:
    """Reads `folder/model.json` of a model of one of these families, by name. `UserError` unless it
    is there, of this version and consistent."""
    if not folder.exists():
        raise UserError(f"there is no checkpoint folder {folder}")
    file = folder / NAME
    if not file.is_file():
        raise UserError(
            f"{folder} is not a varjax checkpoint: it has no {NAME}; PyTorch weights are converted"
            " with `python -m ported_weights`"
        )
    content = described(file)
    _require(file, content, {"family": str})
    if content["family"] not in families:
        known = ", ".join(families)
        raise UserError(f"{file}: unknown family {content['family']!r:.60}, known are {known}")
    family = families[content["family"]]
    _require(file, content, {**dict.fromkeys(family.tree, dict), "schedule": list})
    configs = configurations(file, content, family)
    transformer = configs["transformer"]
    maps = list(map(list, transformer.token_maps))
    for name, value in {"schedule": maps, "num_classes": transformer.num_classes}.items():
        given = content.get(name, 0)  # no classes, no entry
        if repr(given) != repr(value):  # true is not 1
            raise UserError(
                f"{file} is inconsistent: {name} {str(given)[:200]} but the transformer's"
                f" configuration says {str(value)[:200]}"
            )
    check_entries(file, family, content, configs)
    return content


def read_part(folder: Path, name: str, part: Part) -> dict:
    """Reads `folder/NAME.json`, the description of a part with a folder of its own. `UserError` as
    for `read_manifest`."""
    file, advice = folder / f"{name}.json", "convert it with `python -m ported_weights`"
    if not file.is_file():
        what, missing = name.replace("_", " "), f"{folder.name}/{file.name}"
        if folder.is_dir():
            raise UserError(f"{folder} is no {what} (no {file.name}): {advice}")
        raise UserError(f"there is no {what} in {folder.parent} (no {missing}): {advice}")
    content, kind = described(file), part.name.lower()
    if (given := content.get("kind")) != kind:
        raise UserError(f"{file} describes {given!r:.60}, not {kind!r}: {advice}")
    _require(file, content, {"config": dict})
    configuration(file, content, "config", part)
    return content


def described(file: Path) -> dict:
    """The content of a description. `UserError` unless it is an object of this version whose
    computed entries have the right kinds; `arrays.read_arrays` compares them with the files."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it must hold a JSON object")
    version = content.get("format_version")
    if isinstance(version, bool) or version != FORMAT_VERSION:
        raise UserError(
            f"{file} has format version {version!r:.60}, this varjax reads version"
            f" {FORMAT_VERSION}: convert the PyTorch files again with `python -m ported_weights`"
        )
    kinds = {"files": dict, "dtype": str, "parameters": int}
    _require(file, content, kinds | {n: k for n, k in _OPTIONAL.items() if n in content})
    for name in ("files", "beside"):
        checksums.check_records(file, content.get(name, {}), name)
    if not all(isinstance(source, dict) for source in content.get("sources", ())):
        raise UserError(f"{file} is damaged: entry 'sources' must list objects")
    return content


def _require(file: Path, content: Mapping, kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            raise UserError(f"{file} is damaged: entry {name!r} is missing or malformed")


def read_json(path: str | os.PathLike):
    """The value of a JSON file; `UserError` if there is no such file or it is not JSON."""
    try:
        return parse_json(ordinary.read_file(path, LARGEST_JSON).decode("utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read {path} as JSON: {reason:.200}") from error


def read_class_names(path: str | os.PathLike) -> list[str]:
    """The names in a JSON file, a list or {"classes": list}. `UserError` for anything else."""
    names = read_json(path)
    names = names.get("classes") if isinstance(names, dict) else names
    if not (isinstance(names, list) and all(map(is_text, names))):
        raise UserError(f'{path} must hold a list of texts, or {{"classes": [...]}}')
    return names


def parse_json(text: str):
    """The value of a JSON text; `ValueError` also if it is nested too deeply, or an object has a
    key twice."""

    def without_twins(pairs: list[tuple[str, object]]) -> dict:  # Python would keep the last
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"key {twice!a:.60} is there twice")
        return found

    problem = f"lists and objects are nested more than {DEEPEST_JSON} deep"
    try:
        value = json.loads(text, object_pairs_hook=without_twins)
    except RecursionError:
        raise ValueError(problem) from None
    level = [value]
    for _ in range(DEEPEST_JSON):
        lists = [x.values() if isinstance(x, dict) else x for x in level if type(x) in (dict, list)]
        level = [inner for outer in lists for inner in outer]
    if level:
        raise ValueError(problem)
    return value


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
    """Raises `UserError` unless the parts of a `model.json` fit each other, and the entries
    class_names and sampling, where they are there, fit the parts. where: the file or folder, for
    messages. configs: {part: configuration}."""
    with about(f"{where} is inconsistent"):
        family.check(configs)
    transformer = configs["transformer"]
    if "class_names" in content:
        names, count = content["class_names"], transformer.num_classes
        if not (isinstance(names, list) and len(names) == count and all(map(is_text, names))):
            many = f"has {len(names)} names" if isinstance(names, list) else f"is {names!r:.60}"
            raise UserError(
                f"{where}, entry 'class_names' {many}: it must be a list of {count} texts, one for"
                " each class, or be left out"
            )
    if "sampling" in content:
        with about(f"{where}, entry 'sampling'"):
            transformer.check_sampling(recommended_sampling(content["sampling"]))


def is_text(value) -> bool:
    """Whether this is a text that can be shown and written: one without half a surrogate pair."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def recommended_sampling(settings: Mapping, **overrides) -> Sampling:
    """A checkpoint's recommended settings with overrides; an override of None keeps the
    recommendation. Values are not checked here: `check` does that. `UserError` for settings
    that are no mapping, and for unknown names."""
    if not isinstance(settings, Mapping):
        raise UserError(
            f"recommended sampling is {show(settings)}: it must hold names and values, as"
            ' {"cfg": 1.5, "top_k": 900}'
        )
    names = [field.name for field in fields(Sampling)]
    for name in overrides:
        if name not in names:
            close = nearest(name, names)
            raise UserError(f"unknown setting {name!r}: there are {', '.join(names)}{close}")
    chosen = {name: settings[name] for name in RECOMMENDABLE if name in settings}
    chosen |= {name: value for name, value in overrides.items() if value is not None}
    return Sampling(**chosen)
