"""`OUT.partial`, where the files of an unfinished run lie: whose it is, and who may write there.

One process at a time holds it. Nothing is deleted that this program does not write, by its name:
a folder with anything else in it, or a link, is refused. Which run it belongs to is said by
`settings.json` and, should that be lost, by every finished file.
"""

import contextlib
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator

from experiments import batch_files
from experiments.batch_files import Damaged
from varjax.errors import UserError
from varjax.storage import lock
from varjax.storage.atomic import DESKTOP, write_text
from varjax.storage.manifest import parse_json

SETTINGS = "settings.json"
PIXELS = "pixels.npy"  # all pictures, while results are written
_FINISHED = (
    r"(?:(?:main|full)-\d{8,}|cell-[0-9a-f]{16})\.npz"  # series and first image, or a sweep's cell
)
_OURS = rf"(?:{_FINISHED}|{re.escape(SETTINGS)}|{re.escape(PIXELS)})"
OURS = re.compile(rf"{_OURS}|\.{_OURS}\.\d+|{lock.NAME}")  # .NAME.123: not complete
FINISHED = re.compile(_FINISHED)


class WorkFolder:
    """path: of the folder, which need not exist. description: JSON-able; two runs have the same one
    exactly if one may continue the other."""

    def __init__(self, path: pathlib.Path, description: dict):
        self.path = path
        self.settings = json.dumps(description, sort_keys=True)
        self.digest = hashlib.sha256(self.settings.encode()).hexdigest()

    # --- whose it is ------------------------------------------------------------------------------

    def check(self, overwrite: bool) -> None:
        """`UserError` if something else lies here or, unless it may be discarded, another run."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise UserError(
                f"{self.path} is a link or no folder: unfinished runs are kept under that name, so "
                "move it away or choose another --out"
            )
        if foreign := self._foreign():
            raise UserError(
                f"{self.path} holds {foreign!a:.80}, which no run writes: unfinished runs are kept "
                "under that name and nothing else, so move it away or choose another --out"
            )
        conflict = None if overwrite else self._conflict()
        if conflict:
            raise UserError(f"{self.path} holds an unfinished run {conflict}")

    def _foreign(self) -> str | None:
        """The first thing that cannot be ours."""
        for path in self._all():
            plain = path.is_file() and not path.is_symlink()
            if not plain or not (OURS.fullmatch(path.name) or path.name in DESKTOP):
                return path.name
        return None

    def _conflict(self) -> str | None:
        """What is against continuing the run that lies here; None: nothing, or there is none."""
        said = {self._settings_of(path) for path in self.finished()} - {Damaged}
        text = self._stored()
        other = "with other settings: use its settings to continue it, "
        discard = "add --overwrite to discard it, or choose another --out"
        if said - {None, self.digest}:
            return other + discard
        if said == {self.digest} or text == self.settings:
            return None
        if _is_object(text):
            return other + discard
        if None in said or text:
            return (
                f"whose {SETTINGS} is missing or damaged, so that nothing says which run it is: "
                f"put that file back to continue it, {discard}"
            )
        return None

    @staticmethod
    def _settings_of(path: pathlib.Path):
        try:
            return batch_files.settings_of(path)
        except Damaged:
            return Damaged

    def _stored(self) -> str:
        try:
            return (self.path / SETTINGS).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def _all(self) -> list[pathlib.Path]:
        return sorted(self.path.iterdir()) if self.path.is_dir() else []

    def finished(self) -> list[pathlib.Path]:
        """Files of finished batches and cells, sound or not."""
        return [path for path in self._all() if FINISHED.fullmatch(path.name)]

    # --- holding it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out. The folder is made, and gone again if nothing was written.
        `UserError` if another process holds it."""
        busy = f"another run is writing to {self.path}: wait, or choose --out"
        try:
            with lock.held(self.path, busy):
                yield
        finally:
            with contextlib.suppress(OSError):  # not empty: it is needed
                self.path.rmdir()

    def is_held(self) -> bool:
        """Whether another process works here right now."""
        return lock.is_held(self.path)

    def start(self) -> None:
        """Make it this run's, who holds it: what may not be continued is discarded."""
        if self._conflict():
            self.clear()
        for path in self._all():  # left by a process that was killed
            if path.name.startswith(".") or path.name == PIXELS:
                path.unlink()
        if self._stored() != self.settings:
            write_text(self.path / SETTINGS, self.settings)

    def clear(self) -> None:
        """Remove all files of runs; the folder goes with `held`."""
        for path in self._all():
            if path.name != lock.NAME and (OURS.fullmatch(path.name) or path.name in DESKTOP):
                with contextlib.suppress(OSError):
                    path.unlink()


def _is_object(text: str) -> bool:
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False
