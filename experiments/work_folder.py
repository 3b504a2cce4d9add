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
_DISCARD = "add --overwrite to discard it, or choose another --out"


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

    # --- whose it is ------------------------------------------------------------------------------

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
        conflict = None if overwrite else self._conflict()
        if conflict:
            raise UserError(f"{self.path} holds an unfinished run {conflict}")

    def _conflict(self) -> str | None:
        """Return why the run here cannot be continued; None if it can, or if there is none."""
        said, theirs = self._said(), self._theirs()
        if said <= {self.digest} and (said or theirs in (None, self._mine)):
            return None
        if said - {self.digest} or isinstance(theirs, dict):
            differs = self._difference(theirs)
            return f"with other settings{differs}: use its settings to continue it, {_DISCARD}"
        return (
            f"whose {SETTINGS} is missing or damaged, so that nothing says which run it is: put "
            f"that file back to continue it, {_DISCARD}"
        )

    def _difference(self, theirs: object) -> str:
        """Return what differs from their settings, in brackets; empty if nothing does."""
        mine = self._mine
        names = [n for n in mine if isinstance(theirs, dict) and theirs.get(n, mine[n]) != mine[n]]
        each = [f"{n} {show(theirs[n])}, now {show(mine[n])}" for n in names]
        return f" ({some(each, 3, '; ')})" if each else ""

    def differs(self) -> str | None:
        """Return what is different here from the settings, in brackets if it is known; None if
        nothing is. Damaged files count as missing."""
        theirs = self._theirs()
        if self._said() <= {self.digest} and theirs == self._mine:
            return None
        return self._difference(theirs)

    def _said(self) -> set[str]:
        """Return the settings that finished files were made with; damaged ones say none."""
        found = set()
        for path in self.finished():
            with contextlib.suppress(Damaged):
                found.add(batch_files.settings_of(path))
        return found

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

    # --- holding it -------------------------------------------------------------------------------

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

    def is_held(self) -> bool:
        """Return whether another process works here right now."""
        return lock.is_held(self.path)

    def start(self) -> None:
        """Make the folder this run's. A run that cannot be continued is discarded. Call it while
        the folder is held."""
        if self._conflict():
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
