"""Checkpoints of named parts: folders with a description and an Orbax tree of parameters.

    DIR/model.json     what the model is: format version, family, configurations, schedule,
                       classes, recommended sampling, where the weights came from
    DIR/params/        Orbax tree {"transformer": {...}, "codec": {...}}
    DIR/prompt_tokenizer/tokenizer.json    where prompts are token ids: the user's tokenizer
    DIR/text_encoder/  a part with a folder of its own (`Part.own_folder`), which may be absent,
                       and may lie anywhere else alone:
        text_encoder.json   what it is: format version, kind, configuration, sources, files
        params/             Orbax tree of its parameters
        spiece.model        files that belong to it, as published

A checkpoint appears as a whole or not at all. Reading checks the description, then the names and
shapes of all stored arrays, before a single weight is read.
"""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from flax import nnx

from varjax.core.errors import UserError, choose
from varjax.fast.schemes import Scheme
from varjax.storage import arrays, checksums, manifest, parameters
from varjax.storage.atomic import new_folder
from varjax.storage.families import Catalogue, Family, Part

PARAMS = "params"
# names users give, and folders
DEMOS = {"demo": "demo", "demo-eight": "demo_eight", "demo-llamagen": "demo_llamagen"}
COMPUTED = {"files", "own_folders", "beside"}  # entries of `model.json` about what lies beside it
# Parts that may have a folder of their own, in any catalogue: what may be replaced is decided by
# these names, whoever reads the folder.
OWN_FOLDERS = ("text_encoder", "inception", "lpips", "classifier")


def embedded(folder: str, file: str) -> Path:
    """A folder of weights that come with varjax, found by a file in it. `UserError` without it."""
    spec = importlib.util.find_spec("ported_weights")
    for root in spec.submodule_search_locations or [] if spec else []:
        if (Path(root) / folder / file).is_file():
            return Path(root) / folder
    raise UserError(
        f"the embedded {folder.replace('_', ' ')} checkpoint is not installed: name a checkpoint"
        f" folder, or install varjax from a full source tree (folder ported_weights/{folder})"
    )


def part_folder(directory: str | os.PathLike, name: str) -> Path:
    """The own folder of a part: in a checkpoint, or `directory` itself."""
    own = Path(directory)
    return own if (own / f"{name}.json").is_file() else own / name


# --- writing --------------------------------------------------------------------------------------


def save(
    directory: str | os.PathLike,
    what: Family | Part,
    parts: Mapping[str, nnx.Module],
    *,
    metadata: Mapping | None = None,
    dtype=None,
    files: Mapping[str, Mapping[str, str | os.PathLike]] | None = None,
    beside: Mapping[str, str | os.PathLike] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint, the folder `directory`. `UserError`: `directory` exists, or cannot be
    written, or the entries do not fit the model. Nothing is left behind.

    Args:
      what: the family of a model, or the part that `directory` is the own folder of.
      parts: modules with a `config`, by the names that the family gives them; of a single part that
        one, by the name of its folder in checkpoints.
      metadata: further entries of the description: class_names, sampling, converter_version, or
        anything that JSON can hold. `sources` lists the files that the parts were made of, each
        with its `part`, and goes to the description of that part. Computed entries win.
      dtype: storage type of floating parameters; by default they stay as they are.
      files: {part: {name: file}} to copy into the part's own folder, such as a tokenizer.
      beside: {name, such as "prompt_tokenizer/tokenizer.json": file} to copy into the checkpoint.
      overwrite: replace `directory` if it is empty or a checkpoint, and holds nothing else.
    """
    metadata, files, beside = dict(metadata or {}), files or {}, beside or {}
    sources = metadata.get("sources", [])
    if isinstance(what, Part):
        with new_folder(directory, replaces=written if overwrite else None) as folder:
            for name, module in parts.items():
                _write_part(folder, name, what, module, sources, files, dtype)
        return
    own = {name: what.parts[name] for name in parts if what.parts[name].own_folder}
    if own:
        metadata["sources"] = [s for s in sources if s.get("part") not in own]
    with new_folder(directory, replaces=written if overwrite else None) as folder:
        tree = {name: module for name, module in parts.items() if name not in own}
        configs = {name: module.config for name, module in tree.items()}
        free = {k: v for k, v in metadata.items() if k not in COMPUTED}  # of what is written here
        manifest.check_entries(directory, what, free, configs)
        params = _prefixed({name: arrays.host_arrays(x, dtype) for name, x in tree.items()})
        arrays.write_arrays(folder / PARAMS, params)
        content = {**free, **manifest.compose(what, configs, params)}
        content["files"] = checksums.file_records(folder / PARAMS)
        for name, source in beside.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, folder / name)
        if beside:
            content["beside"] = {name: checksums.record(folder / name) for name in beside}
        for name, part in own.items():
            _write_part(folder / name, name, part, parts[name], sources, files, dtype)
        if own:  # the descriptions, which list their files: a part put there later is not in it
            described = {name: folder / name / f"{name}.json" for name in own}
            content["own_folders"] = {n: checksums.record(file) for n, file in described.items()}
        manifest.write_manifest(folder, content)


def written(folder: Path) -> set[str] | None:
    """The files that `save` wrote into a folder (`varjax.storage.atomic.Written`)."""
    content = _said(folder / manifest.NAME, "family")
    if content is None:
        return {name for part in OWN_FOLDERS for name in _part_files(folder, part)} or None
    found = {manifest.NAME, *(f"{PARAMS}/{name}" for name in content["files"])}
    found |= set(content.get("beside", {}))
    for part, record in content.get("own_folders", {}).items():
        if part in OWN_FOLDERS:
            found |= {f"{part}/{name}" for name in _part_files(folder / part, part, record)}
    return found


def _part_files(folder: Path, name: str, record: Mapping | None = None) -> set[str]:
    """The files that the description of a part lists; none if it is not the recorded one."""
    file = folder / f"{name}.json"
    content = _said(file, "kind")
    if content is None or record not in (None, checksums.record(file)):
        return set()
    return {file.name, *content["files"]}


def _said(file: Path, entry: str) -> dict | None:
    """The content of a description with this entry; None if there is no sound one."""
    with contextlib.suppress(UserError):
        content = manifest.described(file)
        return content if entry in content else None
    return None


def _write_part(
    folder: Path, name: str, part: Part, module: nnx.Module, sources: list[dict], files, dtype
) -> None:
    """Writes a part into its own folder, and copies the files there that belong to it. sources,
    files: of all parts."""
    folder.mkdir(exist_ok=True)
    for file, source in files.get(name, {}).items():
        shutil.copyfile(source, folder / file)
    params = arrays.host_arrays(module, dtype)
    arrays.write_arrays(folder / PARAMS, params)
    own = [{k: v for k, v in s.items() if k != "part"} for s in sources if s.get("part") == name]
    content = {
        "format_version": manifest.FORMAT_VERSION,
        "kind": part.name.lower(),
        "sources": own,
        "config": module.config.to_published(),
        **arrays.totals(params),
        "files": checksums.file_records(folder),
    }
    manifest.write_manifest(folder, content, f"{name}.json")


# --- reading --------------------------------------------------------------------------------------


def describe(
    directory: str | os.PathLike, known: Catalogue, names: Iterable[str] | None = None
) -> tuple[dict[str, nnx.Module], dict]:
    """({part: module with shapes and types in place of arrays}, description): reads no weights.

    Args:
      directory: a checkpoint, or the folder of a single part.
      known: the families and parts that may lie there.
      names: of the parts; None: those that share the checkpoint's tree, or the single part.

    Returns the content of `model.json`, or of the part's own file if no part of the tree is named.
    `UserError` without such a checkpoint or part, or for a description that is not usable.
    """
    path, parts, metadata = Path(directory), {}, {}
    if names is None:
        alone = [name for name in OWN_FOLDERS if (path / f"{name}.json").is_file()]
        if foreign := [name for name in alone if name not in known.parts]:
            words = " and a ".join(foreign).replace("_", " ")
            raise UserError(f"{path} is a {words} alone: give the checkpoint of a whole model")
        names = alone or known.family(manifest.read_manifest(path, known.families)["family"]).tree
    names = list(names)
    if any(name not in known.parts for name in names):
        metadata = manifest.read_manifest(path, known.families)
        parts = _abstract_tree(path, metadata, known)
    for name in names:
        if part := known.parts.get(name):
            own = part_folder(path, name)
            content = manifest.read_part(own, name, part)
            parts[name] = part.abstract(manifest.configuration(own, content, "config", part))
            metadata = metadata or content
    return {name: parts[choose("part", name, parts)] for name in names}, metadata


def load(
    directory: str | os.PathLike,
    known: Catalogue,
    dtypes: Mapping[str, object] | None = None,
    on_host: bool = False,
    in_8_bits: Mapping[str, Scheme] | None = None,
    on_disk: bool = False,
) -> tuple[dict[str, nnx.Module], dict]:
    """({part: module}, description) of the parts that are asked for and no others. `UserError`:
    `directory` is no checkpoint, or of another format version; names or shapes do not fit the
    configuration (one message lists all); files are damaged.

    Args:
      directory, known: as in `describe`.
      dtypes: {part: type of its floating parameters, or None for the stored type}. None: the parts
        that `describe` gives without names, with the stored types.
      on_host: as in `arrays.read_arrays`.
      in_8_bits: {parameter of the tree, as "part/name": how} of those that become
        `varjax.fast.quantized.Quantized` as they are read.
      on_disk: read nothing yet: leaves of parts that share the tree are
      `varjax.fast.stored.Stored`.
    """
    path = Path(directory)
    described, metadata = describe(path, known, dtypes)
    dtypes = dict.fromkeys(described) if dtypes is None else dtypes
    tree = {name: dtype for name, dtype in dtypes.items() if name not in known.parts}
    loaded = {}
    if tree:  # names and shapes are checked for all its parts
        checksums.check_files(path / PARAMS, metadata["files"], within=".")
        modules = _abstract_tree(path, metadata, known)
        named = {name: parameters.named(module) for name, module in modules.items()}
        wanted = _prefixed({part: dict.fromkeys(named[part], tree[part]) for part in tree})
        how = {"on_host": on_host, "in_8_bits": in_8_bits, "on_disk": on_disk, "said": metadata}
        found = arrays.read_arrays(path / PARAMS, _prefixed(named), wanted, manifest.NAME, **how)
        for part in tree:
            own = {name: found[f"{part}/{name}"] for name in named[part]}
            loaded[part] = parameters.fill(modules[part], own)
    for name in described.keys() - tree.keys():
        folder, module = part_folder(path, name), described[name]
        content = manifest.read_part(folder, name, known.parts[name])
        checksums.check_files(folder, content["files"], within=PARAMS)
        expected = parameters.named(module)
        wanted, file = dict.fromkeys(expected, dtypes[name]), f"{name}.json"
        found = arrays.read_arrays(folder / PARAMS, expected, wanted, file, on_host, said=content)
        loaded[name] = parameters.fill(module, found)
    return {name: loaded[name] for name in described}, metadata


def _abstract_tree(path: Path, content: Mapping, known: Catalogue) -> dict[str, nnx.Module]:
    family = known.family(content["family"])
    configs = manifest.configurations(path / manifest.NAME, content, family)
    return {name: part.abstract(configs[name]) for name, part in family.tree.items()}


def _prefixed(by_part: Mapping[str, Mapping]) -> dict:
    """{part: {name: x}} -> {"part/name": x}."""
    return {f"{part}/{name}": x for part, of in by_part.items() for name, x in of.items()}
