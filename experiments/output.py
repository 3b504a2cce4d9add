"""Where a command writes: one file, or a folder whose batches are kept as they finish.

While a run goes on its batches lie in `DIR.partial`, which one process at a time may hold. An
interrupted run started again with the same flags continues after the last finished batch; with
other flags it is refused unless --overwrite discards it. On completion results are written and
`DIR.partial` is removed; a run that fails before its first batch leaves nothing.
"""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np

from varjax.cli.flags import CommandFlags
from varjax.errors import UserError
from varjax.storage.atomic import check_new_file, check_new_folder, new_file

SETTINGS = "settings.json"
LOCK = "lock"
RESULTS = pathlib.Path("results")


class BatchStore:
    """`out` and the work folder beside it.

    description: JSON-able; two runs have the same one exactly if one may continue the other.
    """

    def __init__(self, out: pathlib.Path, description: dict, *, overwrite: bool):
        check_new_folder(out, overwrite=overwrite, flag="--out")
        self.out, self.overwrite = out, overwrite
        self.settings = json.dumps(description, sort_keys=True)
        self.work = _partial(out)
        self.resumed = False
        left = _stored_settings(self.work) if self.work.exists() and not overwrite else None
        if left not in (None, self.settings):
            raise UserError(
                f"{self.work} holds an unfinished run with other settings: use its settings to "
                "continue it, add --overwrite to discard it, or choose another --out"
            )

    @classmethod
    def fresh(cls, stem: str, description: dict) -> "BatchStore":
        """The first `results/STEM-NNN` that is free, or unfinished with the same settings."""
        for number in range(1, 1000):
            out = RESULTS / f"{stem}-{number:03d}"
            if out.exists() or _is_held(_partial(out)):
                continue
            with contextlib.suppress(UserError):
                return cls(out, description, overwrite=False)
            # not the unfinished run: no permission, say
            check_new_folder(out, overwrite=False, flag="--out")
        raise UserError(f"{RESULTS} holds 999 runs of {stem}: name a folder with --out")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Hold the work folder: create it, or continue in it; it vanishes again if no batch is
        finished. `UserError` if another process works in it or there is no write permission."""
        self.work.mkdir(parents=True, exist_ok=True)
        with open(self.work / LOCK, "w", encoding="ascii") as lock:
            if not _take(lock):
                raise UserError(f"another run is writing to {self.work}: wait, or choose --out")
            try:
                self._start()
                yield
            finally:
                if not any(self.work.glob("*.npz")):
                    self.close()

    def _start(self) -> None:
        stored = _stored_settings(self.work)
        self.resumed = stored == self.settings and any(self.work.glob("*.npz"))
        if stored != self.settings:
            for path in self.work.iterdir():
                if path.name != LOCK:
                    path.unlink()
            with new_file(self.work / SETTINGS) as file:
                file.write(self.settings.encode())

    def finished(self, series: str) -> int:
        """How many images of a series ("main", "full") are stored, counted without gaps."""
        return sum(len(index) for index, _ in self._indices(series))

    def add(self, series: str, index: np.ndarray, results: dict[str, np.ndarray]) -> None:
        """Keep one finished batch."""
        with new_file(self.work / f"{series}-{index[0]:08d}.npz") as file:
            np.savez(file, index=index, **results)

    def batches(self, series: str) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Stored batches in order, up to the first gap."""
        for index, path in self._indices(series):
            with np.load(path) as archive:
                yield index, {name: archive[name] for name in archive.files if name != "index"}

    def _indices(self, series: str) -> Iterator[tuple[np.ndarray, pathlib.Path]]:
        """(image numbers, file) of the stored batches; nothing else is read of the files."""
        expected = 0
        for path in sorted(self.work.glob(f"{series}-*.npz")):
            with np.load(path) as archive:
                index = archive["index"]
            if index[0] != expected:
                return
            expected = int(index[-1]) + 1
            yield index, path

    def collect(self, series: str) -> dict[str, np.ndarray]:
        """All arrays of a series, images first to last."""
        parts = [results for _, results in self.batches(series)]
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    def close(self) -> None:
        """Remove the work folder, and `results/` if it was made for it alone."""
        shutil.rmtree(self.work, ignore_errors=True)
        if self.work.parent == RESULTS:
            with contextlib.suppress(OSError):
                RESULTS.rmdir()


def _partial(out: pathlib.Path) -> pathlib.Path:
    """Where the batches of an unfinished run into `out` are."""
    return out.with_name(out.name + ".partial")


def _stored_settings(work: pathlib.Path) -> str | None:
    try:
        text = (work / SETTINGS).read_text(encoding="utf-8")
        json.loads(text)
        return text
    except (OSError, ValueError):
        return None


def _take(lock) -> bool:
    """Lock an open file for this process; the system releases it when the process ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: the check is left out
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    lock.write(str(os.getpid()))
    lock.flush()
    return True


def _is_held(work: pathlib.Path) -> bool:
    """Whether another process works in this folder right now."""
    if not (work / LOCK).exists():
        return False
    with open(work / LOCK, "a", encoding="ascii") as lock:
        return not _take(lock)


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
        self._file = flags.string(name, default, help)
        self._overwrite = flags.boolean(
            "overwrite", False, f"Replace the --{name} file if it exists."
        )
        if required:
            flags.require(name)

    @property
    def path(self) -> pathlib.Path | None:
        """The file; None if none is wanted."""
        return pathlib.Path(self._file.value) if self._file.value else None

    def check(self) -> pathlib.Path | None:
        """Likewise. `UserError` unless it may be written there now."""
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
        self._overwrite = flags.boolean("overwrite", False, "Replace --out if it exists.")
        self._out = flags.string("out", None, "Output folder; default: a new one under results/.")

    def open(self, stem: str, description: dict) -> BatchStore:
        """The folder and its finished batches. stem: of the name under results/. description: what
        decides the results."""
        if self._out.value is None:
            return BatchStore.fresh(stem, description)
        out, overwrite = pathlib.Path(self._out.value), self._overwrite.value
        if out.exists() and not overwrite:
            raise UserError(f"{out} exists already: choose another folder or add --overwrite")
        return BatchStore(out, description, overwrite=overwrite)
