"""`OUT.partial`, the folder of an unfinished run: which run it belongs to, and who may write there.

One process at a time holds it. Only files with names that this program writes are ever deleted; a
folder with anything else in it, or a link, is refused. `settings.json` says which run the folder
belongs to, and every finished file says it too, in case `settings.json` is lost.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator

from experiments import batch_files
from experiments.batch_files import Damaged
from varjax.errors import UserError, show, some
from varjax.storage import lock
from varjax.storage.atomic import DESKTOP, write_text
from varjax.storage.manifest import parse_json, read_json

SETTINGS = "settings.json"
PIXELS = "pixels.npy"  # all pictures, while results are written
PART = "part.npz"  # what a finished part of a run says (`experiments.parts`)
_FINISHED = (
    # a series of pictures, features or numbers with its first image; or a cell of a sweep; or what
    # a part of either says
    r"(?:part|(?:main|full|samples|reference|pairs)-\d{8,}|cell-[0-9a-f]{16})\.npz"
)
_OURS = rf"(?:{_FINISHED}|{re.escape(SETTINGS)}|{re.escape(PIXELS)})"
OURS = re.compile(rf"{_OURS}|\.{_OURS}\.\d+|{lock.NAME}")  # .NAME.123 is not complete yet
FINISHED = re.compile(_FINISHED)


class WorkFolder:
    """The folder of an unfinished run.

    path: it need not exist. description: JSON data; it is equal for two runs exactly if one may
    continue the other.
    """

    def __init__(self, path: pathlib.Path, description: dict):
        self.path, self.description = path, description
        self.settings = json.dumps(description, sort_keys=True)
        self._mine = parse_json(self.settings)  # as a file holds them: with lists, no tuples
        self.digest = hashlib.sha256(self.settings.encode()).hexdigest()

    def check(self, overwrite: bool) -> None:
        """Raise `UserError` if anything else than a run lies here, or another run that may not be
        discarded."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise UserError(
                f"{self.path} is a link or no folder: unfinished runs are kept under that name, so "
                "move it away or choose another --out"
            )
        for path in self._all():
            plain = path.is_file() and not path.is_symlink()
            if not plain or not (OURS.fullmatch(path.name) or path.name in DESKTOP):
                raise UserError(
                    f"{self.path} holds {path.name!a:.80}, which no run writes: unfinished runs "
                    "are kept under that name and nothing else, so move it away or choose another "
                    "--out"
                )
        if not overwrite and (conflict := self.conflict()):
            raise UserError(
                f"{self.path} holds an unfinished run {conflict}: use its settings (or put its "
                f"{SETTINGS} back) to continue it, add --overwrite to discard it, or choose "
                "another --out"
            )

    def conflict(self) -> str | None:
        """Return why the run here cannot be continued; None if it can, or if there is none. Its
        settings are those of settings.json and of every finished file; damaged files say none."""
        said = set()
        for path in self.finished():
            with contextlib.suppress(Damaged):
                said.add(batch_files.settings_of(path))
        mine, theirs = self._mine, self._theirs()
        if said <= {self.digest} and (said or theirs in (None, mine)):
            return None
        if not said and not isinstance(theirs, dict):
            return f"whose {SETTINGS} is missing or damaged, so that nothing says which one it is"
        names = [n for n in mine if isinstance(theirs, dict) and theirs.get(n, mine[n]) != mine[n]]
        each = [f"{n} {show(theirs[n])}, now {show(mine[n])}" for n in names]
        return "with other settings" + (f" ({some(each, 3, '; ')})" if each else "")

    def _theirs(self) -> object:
        """Return what settings.json holds; None without one, "?" if it is damaged."""
        try:
            return read_json(self.path / SETTINGS)
        except UserError:
            return "?" if os.path.lexists(self.path / SETTINGS) else None

    def _all(self) -> list[pathlib.Path]:
        return sorted(self.path.iterdir()) if self.path.is_dir() else []

    def finished(self) -> list[pathlib.Path]:
        """Return the files of finished batches and cells, damaged ones too."""
        return [path for path in self._all() if FINISHED.fullmatch(path.name)]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and keep other processes out. It is removed again if nothing was written.
        `UserError` if another process holds it."""
        busy = f"another run is writing to {self.path}: wait, or choose --out"
        try:
            with lock.held(self.path, busy):
                yield
        finally:
            with contextlib.suppress(OSError):  # it stays if it is not empty
                self.path.rmdir()

    def start(self) -> None:
        """Make the folder this run's. A run that cannot be continued is discarded. Call it while
        the folder is held."""
        if self.conflict():
            self.clear()
        for path in self._all():  # left by a process that was killed
            if path.name.startswith(".") or path.name == PIXELS:
                path.unlink()
        if self._theirs() != self._mine:
            write_text(self.path / SETTINGS, self.settings)

    def clear(self) -> None:
        """Remove all files of runs; `held` removes the folder at its end."""
        for path in self._all():
            if path.name != lock.NAME and (OURS.fullmatch(path.name) or path.name in DESKTOP):
                with contextlib.suppress(OSError):
                    path.unlink()
