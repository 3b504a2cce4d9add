"""Output of a command: one file, or a folder whose batches are kept as they finish.

While a run goes on, its batches lie in `DIR.partial` (`experiments.batch_files`). When an
interrupted run is started again with the same flags, it draws the batches that are missing or
damaged; with other flags it is refused, unless --overwrite discards the unfinished run. At the end
the results are written and `DIR.partial` is removed. A run that fails before its first batch leaves
nothing. --overwrite replaces folders that `run`, `sweep` or `evaluate` wrote, and no others.

Of many processes the first one alone reads and writes; the others hear from it what is missing.
"""

import contextlib
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import numpy as np

from experiments import batch_files, processes
from experiments.batch_files import Damaged, Series, WorkFolder
from experiments.cli.flags import CommandFlags
from experiments.processes import Stopped as Stopped
from experiments.prompts.layouts import MANIFEST, image_files
from varjax.core.errors import UserError, about
from varjax.generation import hosts
from varjax.storage import lock
from varjax.storage.atomic import Written, check_new_file, check_new_folder
from varjax.storage.manifest import read_json
from varjax.storage.names import inside

RESULTS = pathlib.Path("results")
Files = dict[int, range]  # {first image of a file: images in it}
# A folder holds results if it has one of these files with at least these entries.
REPORTS = {
    "report.json": {"policy", "kv", "versions"},
    "sweep.json": {"settings", "cells", "versions"},
    "metrics.json": {"recipe", "remarks"},
}
# Every file that the commands may put there, except images; a report's `files` lists what they did.
WRITTEN = {
    "report.json": {
        *("report.json", "grid.png", "samples.npz", "arrays.npz", MANIFEST),
        *("edit.png", "reconstruction.png", "compare.png", "compare.html"),
        *("kept.npz", "kept.png"),
    },
    "sweep.json": {
        *("sweep.json", "sweep.csv", "sweep.md", "samples.npz", "calibration.json"),
        *("fidelity.png", "arguments.png"),
    },
    "metrics.json": {"metrics.json", "per_image.npz"},
}


def say(line: str, quiet: bool = False) -> None:
    """Print a line of progress, in one process."""
    if not quiet and hosts.is_first():
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def still_there(what: str, every: float = 10.0) -> Iterator[None]:
    """Say that `what` goes on and how long it has taken, whenever so many seconds have passed."""
    ended, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(every):
            say(f"{what}, {time.monotonic() - start:.0f} s so far")

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def written(folder: pathlib.Path) -> set[str] | None:
    """Return the files in a folder that a command wrote (`varjax.storage.atomic.Written`); None if
    it is no folder of results."""
    for name, keys in REPORTS.items():
        with contextlib.suppress(UserError):
            content = read_json(folder / name)
            if isinstance(content, dict) and keys <= content.keys():
                listed = content.get("files")
                files = {f for f in WRITTEN[name] if isinstance(listed, list) and f in listed}
                return {name} | files | (image_files(folder) if MANIFEST in files else set())
    return None


class BatchStore:
    """The folder `out` and the work folder, which keeps finished batches.

    description: JSON data; it is equal for two runs exactly if one may continue the other.
    series: the images that there will be, by name ("main", "full"). work: the work folder; None:
    beside `out`.
    """

    def __init__(
        self,
        out: pathlib.Path,
        description: dict,
        *,
        overwrite: bool,
        series: Mapping[str, Series] | None = None,
        work: pathlib.Path | None = None,
    ):
        self.out, self.overwrite, self.series = out, overwrite, dict(series or {})
        self.resumed = False
        # description of the folders that `check_new_folder` may replace; None: none
        self.replaces: Written | None = written if overwrite else None
        self._files: dict[str, Files] = {name: {} for name in self.series}  # sound ones
        if hosts.is_first():  # the others touch no file
            self._check_out()
            self.work = WorkFolder(work or partial_folder(out), description)
            self.check()

    def _check_out(self) -> None:
        """Raise `UserError` unless `out` may be made now."""
        check_new_folder(self.out, replaces=self.replaces, flag="--out")

    def check(self) -> None:
        """Raise `UserError` unless results may be written here now."""
        self._check_out()
        self.work.check(self.overwrite)

    @classmethod
    def fresh(
        cls, stem: str, description: dict, series: Mapping[str, Series] | None = None
    ) -> "BatchStore":
        """Return the store in the first `results/STEM-NNN` that is free, or that holds an
        unfinished run with the same settings."""
        with about("the default folder"):
            first = inside(RESULTS, f"{stem}-001")
        for number in range(1, 1000):
            out = first.with_name(f"{stem}-{number:03d}")
            if os.path.lexists(out) or lock.is_held(partial_folder(out)):
                continue
            with contextlib.suppress(UserError):
                return cls(out, description, overwrite=False, series=series)
            # the reason may be another than the unfinished run, such as a missing permission
            check_new_folder(out, flag="--out")
        raise UserError(f"{RESULTS} holds 999 runs of {stem}: name a folder with --out")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Hold the work folder, new or with finished batches. It is removed again if no batch is
        finished. `UserError`, in all processes, if another run works in it."""
        with contextlib.ExitStack() as stack:
            with processes.together():
                if hosts.is_first():
                    stack.callback(self._leave_results)
                    stack.enter_context(self.work.held())
                    self.check()  # again: another process may have been here since
                    stack.callback(lambda: self.work.finished() or self.close())
                    self.work.start()
                    self.scan()
                    self.resumed = any(self.finished(name) for name in self.series)
            yield

    def _leave_results(self) -> None:
        if self.out.parent == RESULTS:  # it goes if it was made for this run alone
            with contextlib.suppress(OSError):
                RESULTS.rmdir()

    def scan(self) -> None:
        """See which files are there and sound."""
        self._files = {name: self._sound(name) for name in self.series}

    def _path(self, series: str, start: int) -> pathlib.Path:
        return self.work.path / f"{series}-{start:08d}.npz"

    def _sound(self, series: str) -> Files:
        """Return the files of a series, in order. No image is in two of them."""
        named = (path.stem.rpartition("-") for path in self.work.finished())
        starts = [number for name, _, number in named if name == series and number.isdecimal()]
        found: Files = {}
        end = 0
        for start in sorted(map(int, starts)):
            with contextlib.suppress(Damaged, FileNotFoundError):
                count = len(self._read(series, start)["index"])
                if start >= end:
                    end = start + count
                    found[start] = range(start, end)
        return found

    def _read(self, series: str, start: int) -> dict[str, np.ndarray]:
        arrays = batch_files.read_batch(self._path(series, start))
        self.series[series].check(start, arrays)
        return arrays

    def missing(self, series: str) -> list[np.ndarray]:
        """Return the images that are not stored, or damaged: numbers of consecutive ones, at most
        a batch of them at a time. The same in all processes."""
        made = self.series[series]
        lacks = np.ones(made.count, bool)
        for there in self._files[series].values():
            lacks[there.start : there.stop] = False
        lacks = processes.from_first(lacks)
        numbers = np.flatnonzero(lacks[made.made.start : made.made.stop]) + made.made.start
        gaps = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
        size = made.batch_size
        return [gap[i : i + size] for gap in gaps for i in range(0, len(gap), size)]

    def finished(self, series: str) -> int:
        return sum(map(len, self._files[series].values()))

    def add(self, series: str, index: np.ndarray, results: dict[str, np.ndarray]) -> None:
        """Keep consecutive images. All processes have the same ones."""
        if not hosts.is_first():
            return
        start, arrays = int(index[0]), {"index": index, **results}
        self.series[series].check(start, arrays)
        batch_files.write_batch(self._path(series, start), self.work.digest, arrays)
        self._files[series][start] = range(start, start + len(index))

    def batches(self, series: str) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yield (numbers of the images, arrays by name) of all files in order."""
        for start in sorted(self._files[series]):
            try:
                arrays = self._read(series, start)
            except Damaged as error:  # it was sound when the run started
                raise UserError(
                    f"{self._path(series, start)} is damaged ({error!s:.200}): start the same "
                    "command again, which draws it anew"
                ) from None
            yield arrays.pop("index"), arrays

    def close(self) -> None:
        """Empty the work folder; `working` removes it at its end."""
        self.work.clear()


def partial_folder(out: pathlib.Path) -> pathlib.Path:
    """Return the folder for the batches of an unfinished run into `out`."""
    if out.name in ("", ".."):  # `.` has an empty name, to which nothing can be appended
        out = pathlib.Path(os.path.abspath(out))
    return out.with_name(out.name + ".partial")


# --- flags ----------------------------------------------------------------------------------------


class FileFlags:
    """--NAME=FILE and --overwrite."""

    def __init__(
        self,
        flags: CommandFlags,
        name: str,
        help: str,
        *,
        default: str | None = None,
        required: bool = False,
    ):
        self._file = flags.string(name, default, help, required=required)
        self._overwrite = flags.boolean(
            "overwrite", False, f"Replace the --{name} file if it exists."
        )

    @property
    def path(self) -> pathlib.Path | None:
        return pathlib.Path(self._file.value) if self._file.value else None

    def check(self) -> pathlib.Path | None:
        """Return `path`; `UserError` unless it may be written now."""
        if self.path is not None:
            overwrite = self._overwrite.value
            if self.path.is_file() and not overwrite:
                raise UserError(
                    f"{self.path} exists already: choose another file or add --overwrite"
                )
            check_new_file(self._file.value, overwrite=overwrite, flag=f"--{self._file.name}")
        return self.path


class FolderFlags:
    """--out and --overwrite of a command whose interrupted runs continue."""

    def __init__(self, flags: CommandFlags):
        self.overwrite = flags.boolean("overwrite", False, "Replace --out if it exists.")
        self._out = flags.string("out", None, "Output folder; default: a new one under results/.")

    @property
    def path(self) -> pathlib.Path | None:
        return None if self._out.value is None else pathlib.Path(self._out.value)

    def open(
        self, stem: str, description: dict, series: Mapping[str, Series] | None = None
    ) -> BatchStore:
        """Return the store for the folder, with the batches that are finished.

        stem: how a new folder under results/ begins. description, series: see `BatchStore`.
        `UserError`, in all processes, unless the first one may write there."""
        with processes.together():
            out, overwrite = self.path, self.overwrite.value
            if hosts.is_first() and out is None:
                return BatchStore.fresh(stem, description, series)
            if hosts.is_first() and os.path.lexists(out) and not overwrite:
                raise UserError(f"{out} exists already: choose another folder or add --overwrite")
            return BatchStore(out or RESULTS, description, overwrite=overwrite, series=series)
