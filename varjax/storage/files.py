"""Files that appear complete or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from varjax.errors import UserError
from varjax.storage.folders import check_place, naming


def check_file_place(path: str | os.PathLike, *, overwrite: bool, flag: str) -> Path:
    """`path` as it was given, if a file may be written there now. `flag` is named in messages.

    Raises:
      UserError: it exists and may not be replaced or is no file; its folder does not exist or
        cannot be written.
    """
    target = check_place(path, kind="file", flag=flag)
    if target.is_dir():
        raise UserError(f"{flag}={path} is a folder: name a file")
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"{path} exists already: choose another file or add --overwrite")
    if target.exists() and not target.is_file():
        raise UserError(f"{flag}={path} is no ordinary file: choose another one")
    if not target.parent.is_dir():
        raise UserError(f"{flag}={path}: there is no folder {target.parent}: create it first")
    return Path(path)


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Give a binary file to fill; it becomes `path` on success and vanishes on any error.

    The content is written beside `path` and renamed, so a reader sees the old file or the new one.

    Raises:
      OSError: no such folder, no write permission, no space left.
    """
    target = Path(path)
    work = target.with_name(f".{target.name}.{os.getpid()}")
    with naming(path, target):
        try:
            with open(work, "wb") as file:
                yield file
            os.replace(work, target)
        finally:
            work.unlink(missing_ok=True)
