"""Zip files as torch.save writes them: members are not compressed, and each has its own bytes.

Only the bytes that are asked for are read, so a small file never becomes large in memory. Whatever
makes zip files ambiguous or expensive is refused: compression, two members of one name, members
that share bytes, sizes that contradict each other.
"""

import contextlib
import struct
import zipfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np

from varjax.core.errors import UserError
from varjax.storage import ordinary

MAX_DIRECTORY = 16 * 2**20  # bytes of the list of members; a tensor usually takes 100
CHUNK = 2**24  # bytes that are read at a time
LOCAL_HEADER = 30  # bytes before a member, beside its name
_FROM_ZIPFILE = (ValueError, ArithmeticError, RuntimeError, OSError, EOFError, struct.error)
_ENCRYPTED = 1  # flag of a member


def damaged(path: Path, reason: object) -> UserError:
    """Return the error that a file is damaged."""
    return UserError(f"{path} is damaged or incomplete ({reason!s:.200}): download it again")


class _Head(FileIO):
    """A file that refuses reads of more bytes than the list of members may have."""

    def read(self, size: int = -1) -> bytes:
        if size > MAX_DIRECTORY:
            raise zipfile.BadZipFile("the list of its members is implausibly large")
        return super().read(size)


class Archive:
    """An open zip file. Every method raises `UserError` if the file is damaged."""

    def __init__(self, path: Path):
        self.path, self._file = path, ordinary.opened(path)
        self._sound: set[str] = set()  # members whose checksum was compared
        with self._readable():
            self._archive = zipfile.ZipFile(_Head(self._file.fileno(), closefd=False))
            infos, limit = self._archive.infolist(), self._archive.start_dir
            self._members = {info.filename: info for info in infos}
            if len(self._members) != len(infos):
                raise zipfile.BadZipFile("two of its members have the same name")
            # they lie one after another, before the list
            for info in sorted(infos, key=lambda info: info.header_offset, reverse=True):
                start = info.header_offset + LOCAL_HEADER + len(info.orig_filename)
                if start + info.compress_size > limit:
                    problem = f"{info.filename!r:.80} reaches into what follows it"
                    raise zipfile.BadZipFile(problem)
                limit = info.header_offset

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (zipfile.BadZipFile, *_FROM_ZIPFILE) as error:
            raise damaged(self.path, str(error) or type(error).__name__) from error

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def size(self, name: str) -> int | None:
        """Return the number of bytes of a member, None if there is no such member."""
        return self._members[name].file_size if name in self._members else None

    def read(self, name: str, most: int) -> bytes:
        """Read a whole member, which may have up to `most` bytes."""
        if (self.size(name) or 0) > most:
            raise UserError(f"{self.path}: {name} is implausibly large")
        return self.values(name, np.dtype("u1"), 0, self.size(name) or 0).tobytes()

    def values(self, name: str, dtype: np.dtype, first: int, end: int) -> np.ndarray:
        """Read elements `first` to `end` - 1 of a member; the first time all of it is read, and its
        checksum compared."""
        info = self._members.get(name)
        if info is None:
            raise damaged(self.path, f"there is no member {name!r:.80}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise UserError(
                f"{self.path}: {name!r:.80} is compressed or encrypted, as torch.save never"
                " does: save it again with torch.save(torch.load(file, weights_only=True), new)"
            )
        with self._readable(), self._archive.open(info) as member:
            while name not in self._sound:
                if not member.read(CHUNK):
                    self._sound.add(name)
            found = np.empty(end - first, dtype)
            member.seek(first * dtype.itemsize)
            rest = memoryview(found.view("u1"))
            while rest and (count := member.readinto(rest[:CHUNK])):
                rest = rest[count:]
            if rest:
                raise zipfile.BadZipFile("it ends too early")
        return found
