"""Files that appear complete or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Give a binary file to fill; it becomes `path` on success and vanishes on any error.

    The content is written beside `path` and renamed, so a reader sees the old file or the new one.

    Raises:
      OSError: no such folder, no write permission, no space left.
    """
    target = Path(path)
    work = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(work, "wb") as file:
            yield file
        os.replace(work, target)
    finally:
        work.unlink(missing_ok=True)
