"""Files that users or other programs made: only ordinary ones are opened, and read up to a limit.

Opening a named pipe would wait for its other end, and a device such as /dev/zero never ends.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def opened(path: str | os.PathLike, mode: str = "rb") -> BinaryIO:
    """Opens an ordinary file. `OSError` as from `open`, and for all other kinds of files. Where it
    may be created, links are refused, too."""
    return open(path, mode, opener=_open_at_once)


def _open_at_once(path, flags: int) -> int:
    if flags & os.O_CREAT:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        number = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)  # Windows has neither
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ELOOP):  # of a socket, of a link
            raise
        raise _other(path) from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise _other(path)
    return number


def _other(path) -> OSError:
    return OSError(errno.EINVAL, "it is no ordinary file", os.fspath(path))


def read_file(path: str | os.PathLike, most: int) -> bytes:
    """The content of a file of at most `most` bytes. `OSError` also if it is larger."""
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return data


def check_folder(folder: str | os.PathLike) -> None:
    """Raises `OSError` if something else than files and folders lies below a folder."""
    for path in Path(folder).rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise _other(path)


def refuse(error: OSError) -> None:
    """Raises an error over a folder that cannot be listed, which `os.walk` would leave out."""
    raise error


def is_hidden(name: str) -> bool:
    """Whether a file or folder belongs to a system, not to a user's data: `.DS_Store`, `._0.png`,
    `.ipynb_checkpoints`, ..."""
    return name.startswith(".") or name in ("__MACOSX", "Thumbs.db")
