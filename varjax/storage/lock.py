"""One process at a time in a folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from varjax.core.errors import UserError
from varjax.storage import ordinary

NAME = "lock"  # the file in the folder, which is there as long as somebody holds it


@contextlib.contextmanager
def held(folder: str | os.PathLike, message: str) -> Iterator[None]:
    """Holds `folder` while the block runs; the system releases it if the process dies. The folder
    is made if it is not there, and removed again if it is empty at the end. `UserError`: `message`,
    if another process holds it. `OSError`: the folder or a file in it cannot be made."""
    folder = Path(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]  # deepest first
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = _take(folder / NAME)
        if lock is None:
            raise UserError(message)
        with lock:
            try:
                yield
            finally:
                (folder / NAME).unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):  # not empty: it is used
            for path in made:
                path.rmdir()


def is_held(folder: str | os.PathLike) -> bool:
    """Whether another process holds the folder right now."""
    path = Path(folder) / NAME
    if not path.is_file():
        return False
    lock = _take(path)
    if lock is not None:
        lock.close()
    return lock is None


def _take(path: Path) -> BinaryIO | None:
    """The lock file, open and locked; None if another process has locked it."""
    while True:
        file = ordinary.opened(path, "ab")
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except (ImportError, OSError):  # no such locks on this system: the check is left out
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()  # removed by the one who held it before us
