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
from varjax.storage.manifest import LARGEST_JSON, parse_json

SETTINGS = "settings.json"
PIXELS = "pixels.npy"  # all pictures, while results are written
_FINISHED = (
    # series (of pictures, or of their features and numbers) and first image, or a sweep's cell
    r"(?:(?:main|full|samples|reference|pairs)-\d{8,}|cell-[0-9a-f]{16})\.npz"
)
_OURS = rf"(?:{_FINISHED}|{re.escape(SETTINGS)}|{re.escape(PIXELS)})"
OURS = re.compile(rf"{_OURS}|\.{_OURS}\.\d+|{lock.NAME}")  # .NAME.123: not complete
FINISHED = re.compile(_FINISHED)
# What is against continuing an unfinished run, and what to do.
_DISCARD = "add --overwrite to discard it, or choose another --out"
OTHER = f"with other settings: use its settings to continue it, {_DISCARD}"
OLDER = (
    "of an older version ({} does not say what it is): finish it with that version, move that file "
    f"away, {_DISCARD}"
)
LOST = (
    f"whose {SETTINGS} is missing or damaged, so that nothing says which run it is: put that file "
    f"back to continue it, {_DISCARD}"
)


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
        by_file = {path.name: self._settings_of(path) for path in self.finished()}
        said, text = {*by_file.values()} - {None, Damaged}, self._stored()
        if older := [name for name, settings in by_file.items() if settings is None]:
            return OLDER.format(older[0])
        if said - {self.digest}:
            return OTHER
        if said or text in ("", self.settings):
            return None
        return OTHER if _is_object(text) else LOST

    @staticmethod
    def _settings_of(path: pathlib.Path):
        try:
            return batch_files.settings_of(path)
        except Damaged:
            return Damaged

    def _stored(self) -> str:
        """What settings.json says; text that is no JSON if it is larger than any."""
        try:
            with open(self.path / SETTINGS, "rb") as file:
                data = file.read(LARGEST_JSON + 1)
        except FileNotFoundError:
            return ""
        return "?" if len(data) > LARGEST_JSON else data.decode("utf-8", "replace")

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
