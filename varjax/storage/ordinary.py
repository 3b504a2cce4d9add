"""Files that users name: only ordinary ones are opened, and only so much of them is read.

To open a named pipe would wait for its other end, and a device such as /dev/zero never ends.
"""

import errno
import os
import stat
from typing import BinaryIO


def opened(path: str | os.PathLike) -> BinaryIO:
    """An ordinary file, to be read. `OSError` as `open` raises it, and for all other kinds."""
    file = open(path, "rb", opener=_open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no ordinary file")
    return file


def _open_at_once(path, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such pipes


def read(path: str | os.PathLike, most: int) -> bytes:
    """What a file of at most so many bytes holds. `OSError` also if it is larger."""
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return data
