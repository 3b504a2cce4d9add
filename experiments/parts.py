"""`--shard=I/N`: one of N jobs that share the images of a run, or the cells of a sweep, without any
communication.

Job I works in OUT/part-I-of-N, where its finished files stay; `experiments.merge` checks that all
parts are there and joins them. Each job has images that follow one another: whole batches, so that
every program call is one that a single process would have made, or parts of one batch where there
are fewer batches than jobs. `part.npz` of its folder says that a part is finished. It and the
batches or cells beside it hold the digest of the settings and a seal each
(`experiments.batch_files`), so that parts of other runs, and files that were changed, are found.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from experiments import batch_files
from experiments.batch_files import OURS, PART, SETTINGS_FILE, Damaged, Series, WorkFolder
from experiments.cli.flags import CommandFlags
from experiments.output import BatchStore, FolderFlags, written
from varjax.core.errors import UserError, some
from varjax.generation import hosts
from varjax.storage.atomic import DESKTOP, check_place
from varjax.storage.manifest import read_json

MOST = 10**5  # jobs of a run
NAME = re.compile(r"part-(0|[1-9]\d{0,5})-of-([1-9]\d{0,5})")


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, counted from 0."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read "2/8". `UserError` unless it names one of its parts."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
        index, count = map(int, match.groups()) if match else (0, 0)
        if not index < count <= MOST:
            raise UserError(
                f"--shard={text:.60} is no part: write I/N, part I (0 to N - 1) of N, N at most "
                f"{MOST}, for example 0/8"
            )
        return cls(index, count)

    def __str__(self) -> str:
        return f"part {self.index} of {self.count}"

    def images(self, count: int, batch_size: int) -> range:
        """Return the images of this part, of `count` images."""
        batches = -(-count // batch_size)
        unit, units = (batch_size, batches) if batches >= self.count else (1, count)
        first, last = (i * units // self.count * unit for i in (self.index, self.index + 1))
        return range(first, min(last, count))


class ShardFlag:
    """--shard of a command that has --out."""

    def __init__(self, flags: CommandFlags, what: str):
        self._flag = flags.string(
            "shard",
            None,
            f"I/N: only part I (from 0 on) of N of the {what}, into OUT/part-I-of-N; "
            "experiments.merge joins the parts.",
        )

    @property
    def shard(self) -> Shard | None:
        """The part that is asked for; None: everything. `UserError` if there is no such part."""
        return None if self._flag.value is None else Shard.parse(self._flag.value)

    def open(
        self,
        folder: FolderFlags,
        stem: str,
        description: dict,
        series: Mapping[str, Series] | None = None,
    ) -> BatchStore:
        """Return the store of the part or, without --shard, of the whole (`FolderFlags.open`).
        `UserError` also if other parts were made with other settings."""
        if (shard := self.shard) is None:
            return folder.open(stem, description, series)
        if hosts.count() > 1:
            raise UserError(
                f"--shard={self._flag.value} and --distributed: parts know nothing of each other, "
                "processes do: leave out one of them"
            )
        if folder.path is None:
            raise UserError(f"--shard={self._flag.value}: name the folder of all parts with --out")
        out, overwrite = folder.path, folder.overwrite.value
        store = PartStore(out, shard, description, overwrite=overwrite, series=series)
        for index, other in () if overwrite else parts_in(out):
            if index != shard.index:
                with contextlib.suppress(FileNotFoundError):  # its job is at work: files go
                    WorkFolder(other, description).check(overwrite=False)
        return store


class PartStore(BatchStore):
    """One part of a run in OUT/part-I-of-N. Its files stay there until they are joined."""

    def __init__(
        self,
        out: pathlib.Path,
        shard: Shard,
        description: dict,
        *,
        overwrite: bool,
        series: Mapping[str, Series] | None = None,
    ):
        self.shard = shard
        work = out / f"part-{shard.index}-of-{shard.count}"
        super().__init__(out, description, overwrite=overwrite, series=series, work=work)

    def _check_out(self) -> None:
        check_place(self.out, flag="--out")
        if os.path.lexists(self.out):
            check_parts_folder(self.out, self.shard.count)


def parts_in(out: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    found = [(NAME.fullmatch(path.name), path) for path in out.iterdir()] if out.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match)


def check_parts_folder(out: pathlib.Path, count: int | None = None) -> int | None:
    """Raise `UserError` unless a folder holds parts of one division and nothing else. Return of how
    many they are; None if there are none.

    count: of how many they have to be; None: of any number."""
    if out.is_symlink() or not out.is_dir():
        raise UserError(f"{out} is a link or no folder: name a folder for the parts with --out")
    if written(out) is not None:
        raise UserError(
            f"{out} holds finished results already: choose another folder, or move it away"
        )
    for path in sorted(out.iterdir()):
        if path.name in DESKTOP:
            continue
        index, of = map(int, match.groups()) if (match := NAME.fullmatch(path.name)) else (0, 0)
        if index >= of:
            raise UserError(
                f"{out} holds {path.name!a:.80}, which is no part of a run: choose another folder, "
                "or move that away"
            )
        count = count or of
        if of != count:
            raise UserError(
                f"{out} holds {path.name}, a part of another division than of {count}: finish or "
                "remove its parts, or choose another folder"
            )
    return count


# --- finished parts ---


def is_written(store: PartStore) -> bool:
    """Return whether a part says that it is finished."""
    with contextlib.suppress(Damaged, OSError):
        batch_files.read_batch(store.work.path / PART)
        return batch_files.settings_of(store.work.path / PART) == store.work.digest
    return False


@dataclass(frozen=True, eq=False)
class FinishedPart:
    """A finished part. content: JSON data that it says, and arrays."""

    shard: Shard
    work: WorkFolder
    content: dict
    arrays: Mapping[str, np.ndarray]


def read_parts(out: pathlib.Path) -> list[FinishedPart]:
    """Return all parts of a folder, in order. `UserError` if a part is missing, damaged, not
    finished, or of other settings or versions than the first one."""
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
        first = read_json(folder / SETTINGS_FILE)
    except UserError as error:
        raise UserError(
            f"{folder}: {SETTINGS_FILE} is missing or damaged ({error!s:.300}): put it back, or "
            f"{again(folder)}"
        ) from None
    parts = [_read(folder, Shard(index, count), first) for index, folder in found]
    for part in parts[1:]:
        ours, theirs = (p.content["environment"]["versions"] for p in (parts[0], part))
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                raise UserError(
                    f"{parts[0].shard} was made with {name} {ours.get(name)}, {part.shard} with "
                    f"{theirs.get(name)}: make both with one version"
                )
    return parts


def again(folder: pathlib.Path) -> str:
    _, index, _, count = folder.name.split("-")
    return f"start its command again (--shard={index}/{count}), which makes what is missing"


def _read(folder: pathlib.Path, shard: Shard, settings: dict) -> FinishedPart:
    work = WorkFolder(folder, settings)
    work.check(overwrite=True)  # nothing else than files of runs
    if conflict := work.conflict():
        raise UserError(
            f"{shard} in {folder} was edited, or is a run {conflict}: remove it and make it again "
            "with the flags of the first one"
        )
    try:
        content, arrays = batch_files.read_with(folder / PART)
    except FileNotFoundError:
        raise UserError(f"{shard} in {folder} is not finished: {again(folder)}") from None
    except Damaged as error:
        raise UserError(
            f"{folder / PART} is damaged ({error!s:.200}): remove it and {again(folder)}"
        ) from None
    return FinishedPart(shard, work, content, arrays)


def device_of(parts: list[FinishedPart]) -> str:
    return "; ".join(dict.fromkeys(part.content["environment"]["device"] for part in parts))


def files_of_parts(out: pathlib.Path) -> set[str]:
    """Return the files below a folder that belong to parts (`varjax.storage.atomic.Written`)."""
    files = (path for _, folder in parts_in(out) for path in folder.iterdir())
    ours = (path for path in files if OURS.fullmatch(path.name) or path.name in DESKTOP)
    return {f"{path.parent.name}/{path.name}" for path in ours}
