"""What a finished part of a run says, in `part.npz` of its folder, and the parts of a folder,
checked together.

A part's batches or cells lie beside it. They and `part.npz` hold the digest of the settings and a
seal each (`experiments.batch_files`), so that parts of different runs, and files that were changed,
are found.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from experiments import batch_files
from experiments.batch_files import Damaged
from experiments.shards import PartStore, Shard, check_parts_folder, parts_in
from experiments.work_folder import OURS, PART, SETTINGS, WorkFolder
from varjax.errors import UserError, some
from varjax.io.json_text import json_safe
from varjax.storage import lock
from varjax.storage.atomic import DESKTOP
from varjax.storage.manifest import parse_json, read_json

CONTENT = "content"  # the array that holds JSON in UTF-8


def write(store: PartStore, content: Mapping, arrays: Mapping[str, np.ndarray]) -> None:
    """Say that a part is finished. content: JSON data."""
    text = json.dumps(json_safe(content)).encode("utf-8", "surrogatepass")
    held = {**arrays, CONTENT: np.frombuffer(text, np.uint8)}
    batch_files.write(store.work.path / PART, store.work.digest, held)


def is_written(store: PartStore) -> bool:
    """Return whether a part says that it is finished."""
    with contextlib.suppress(Damaged, OSError):
        batch_files.read(store.work.path / PART)
        return batch_files.settings_of(store.work.path / PART) == store.work.digest
    return False


@dataclass(frozen=True, eq=False)
class Part:
    """A finished part. content: JSON data that it says, and arrays."""

    shard: Shard
    work: WorkFolder
    content: dict
    arrays: Mapping[str, np.ndarray]


def read(out: pathlib.Path) -> list[Part]:
    """Return all parts of a folder, in order.

    Raises:
      UserError: a part is missing, damaged, not finished, or of other settings or versions than
        the first one.
    """
    if not out.exists():
        raise UserError(f"there is no folder {out}: name the --out of the parts")
    if (count := check_parts_folder(out)) is None:
        raise UserError(f"{out} holds no parts: name the --out of runs with --shard=I/N")
    found = parts_in(out)
    if missing := sorted(set(range(count)) - {index for index, _ in found}):
        named = [f"{index}/{count}" for index in missing]
        raise UserError(
            f"{out} lacks {len(missing)} of {count} parts: start the same command with "
            f"--shard={some(named, 5)}"
        )
    folder = found[0][1]
    try:
        first = read_json(folder / SETTINGS)
    except UserError as error:
        raise UserError(
            f"{folder}: {SETTINGS} is missing or damaged ({error!s:.300}): put it back, or "
            f"{again(folder)}"
        ) from None
    parts = [_read(folder, Shard(index, count), first) for index, folder in found]
    for part in parts[1:]:
        _check_like(parts[0], part)
    return parts


def again(folder: pathlib.Path) -> str:
    """Return what to do with a damaged part."""
    _, index, _, count = folder.name.split("-")
    return f"start its command again (--shard={index}/{count}), which makes what is missing"


def _read(folder: pathlib.Path, shard: Shard, settings: dict) -> Part:
    work = WorkFolder(folder, settings)
    if lock.is_held(folder):
        raise UserError(f"{shard} is still at work in {folder}: wait until it has ended")
    work.check(overwrite=True)  # nothing else than files of runs
    if conflict := work.conflict():
        raise UserError(
            f"{shard} in {folder} was edited, or is a run {conflict}: remove it and make it again "
            "with the flags of the first one"
        )
    try:
        arrays = batch_files.read(folder / PART)
        content = parse_json(bytes(arrays.pop(CONTENT)).decode("utf-8", "surrogatepass"))
    except FileNotFoundError:
        raise UserError(f"{shard} in {folder} is not finished: {again(folder)}") from None
    except (Damaged, KeyError, ValueError) as error:
        raise UserError(
            f"{folder / PART} is damaged ({error!s:.200}): remove it and {again(folder)}"
        ) from None
    return Part(shard, work, content, arrays)


def _check_like(first: Part, part: Part) -> None:
    """`UserError` unless two parts were made by one version of everything."""
    ours, theirs = (p.content["environment"]["versions"] for p in (first, part))
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"{first.shard} was made with {name} {ours.get(name)}, {part.shard} with "
                f"{theirs.get(name)}: make both with one version"
            )


def device_of(parts: list[Part]) -> str:
    """Return the devices that made the parts, each kind once."""
    return "; ".join(dict.fromkeys(part.content["environment"]["device"] for part in parts))


@contextlib.contextmanager
def held(parts: list[Part]) -> Iterator[None]:
    """Keep other processes out of all parts."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(part.work.held())
        yield


def files_of_parts(out: pathlib.Path) -> set[str]:
    """Return the files below a folder that belong to parts (`varjax.storage.atomic.Written`)."""
    found = set()
    for _, folder in parts_in(out):
        for path in folder.iterdir():
            if OURS.fullmatch(path.name) or path.name in DESKTOP or path.name == lock.NAME:
                found.add(f"{folder.name}/{path.name}")
    return found
