"""Files that users name: only ordinary files are opened, and they are read up to a limit.

Opening a named pipe would wait for its other end, and a device such as /dev/zero never ends.
"""

import errno
import os
import stat
from typing import BinaryIO


def opened(path: str | os.PathLike) -> BinaryIO:
    """Open an ordinary file for reading. `OSError` as from `open`, and for all other kinds of
    files."""
    file = open(path, "rb", opener=_open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no ordinary file")
    return file


def _open_at_once(path, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such pipes


def read(path: str | os.PathLike, most: int) -> bytes:
    """The content of a file of at most `most` bytes. `OSError` also if it is larger."""
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return data
