"""Zip files as torch.save writes them: members are not compressed, and each has its own bytes.

Only the bytes that are asked for are read, so a small file never becomes large in memory. Whatever
makes zip files ambiguous or expensive is refused: compression, two members of one name, members
that share bytes, sizes that contradict each other.
"""

import struct
import zipfile
import zlib
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from varjax.errors import UserError
from varjax.storage import ordinary

MAX_DIRECTORY = 16 * 2**20  # bytes of the list of members; a tensor usually takes 100
CHUNK = 2**24  # bytes that a checksum reads at a time
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_FROM_ZIPFILE = (ValueError, ArithmeticError, NotImplementedError, OSError, struct.error)
_ENCRYPTED, _IN_DESCRIPTOR, _UTF8 = 1, 8, 2048  # flags of a member


@dataclass(frozen=True)
class Member:
    """A member: where its bytes begin in the file, their number and checksum."""

    start: int
    size: int
    crc: int
    is_plain: bool  # neither compressed nor encrypted


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
        self.path = path
        self._file = ordinary.opened(path).detach()  # without a buffer
        self._sound: set[str] = set()  # members whose checksum was compared
        try:
            head = _Head(self._file.fileno(), closefd=False)
            with zipfile.ZipFile(head) as archive:
                infos, end = archive.infolist(), archive.start_dir
            self._members = {info.filename: self._member(info) for info in infos}
        except (zipfile.BadZipFile, *_FROM_ZIPFILE) as error:
            raise damaged(self.path, error) from error
        if len(self._members) != len(infos):
            raise damaged(self.path, "two of its members have the same name")
        self._check_places(infos, end)

    def _member(self, info: zipfile.ZipInfo) -> Member:
        """Return what the list says about a member, if the header before its bytes agrees."""
        self._file.seek(info.header_offset)
        header = LOCAL_HEADER.unpack(self._file.read(LOCAL_HEADER.size))
        signature, _, flags, method, *_, packed, size, name_length, extra_length = header
        later = flags & _IN_DESCRIPTOR or 0xFFFFFFFF in (packed, size)  # the sizes are elsewhere
        name = self._file.read(name_length).decode("utf-8" if flags & _UTF8 else "cp437")
        if (
            signature != b"PK\x03\x04"
            or name != info.orig_filename
            or method != info.compress_type
            or not (later or (packed, size) == (info.compress_size, info.file_size))
        ):
            raise zipfile.BadZipFile(f"{info.filename!r:.80} is not where the list says")
        start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
        encrypted = (flags | info.flag_bits) & _ENCRYPTED
        is_plain = info.compress_type == zipfile.ZIP_STORED and not encrypted
        return Member(start, info.file_size, info.CRC, is_plain)

    def _check_places(self, infos: list[zipfile.ZipInfo], end: int) -> None:
        """Check that members lie one after another, before the list, which begins at `end`."""
        limit = end
        for info in sorted(infos, key=lambda info: info.header_offset, reverse=True):
            if self._members[info.filename].start + info.compress_size > limit:
                raise damaged(self.path, f"{info.filename!r:.80} reaches into what follows it")
            limit = info.header_offset

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def size(self, name: str) -> int | None:
        """Return the number of bytes of a member, None if there is no such member."""
        return self._members[name].size if name in self._members else None

    def read(self, name: str, most: int) -> bytes:
        """Read a whole member, which may have up to `most` bytes."""
        if (self.size(name) or 0) > most:
            raise UserError(f"{self.path}: {name} is implausibly large")
        return self.values(name, np.dtype("u1"), 0, self.size(name) or 0).tobytes()

    def values(self, name: str, dtype: np.dtype, first: int, end: int) -> np.ndarray:
        """Read elements `first` to `end` - 1 of a member, after comparing its checksum."""
        self._check(name)
        found = np.empty(end - first, dtype)
        self._fill(self._members[name].start + first * dtype.itemsize, found)
        return found

    def _check(self, name: str) -> None:
        """Compare the checksum of a member the first time, `CHUNK` bytes at a time."""
        member = self._members.get(name)
        if member is None:
            raise damaged(self.path, f"there is no member {name!r:.80}")
        if not member.is_plain:
            raise UserError(
                f"{self.path}: {name!r:.80} is compressed or encrypted, as torch.save never"
                " does: save it again with torch.save(torch.load(file, weights_only=True), new)"
            )
        if name in self._sound:
            return
        crc, buffer = 0, np.empty(min(CHUNK, member.size), "u1")
        for start in range(0, member.size, CHUNK):
            part = buffer[: member.size - start]
            self._fill(member.start + start, part)
            crc = zlib.crc32(part, crc)
        if crc != member.crc:
            raise damaged(self.path, f"the checksum of {name!r:.80} is wrong")
        self._sound.add(name)

    def _fill(self, start: int, array: np.ndarray) -> None:
        """Read the file from byte `start` into the array."""
        self._file.seek(start)
        rest = memoryview(array.view("u1"))
        while rest and (count := self._file.readinto(rest)):
            rest = rest[count:]
        if rest:
            raise damaged(self.path, "it ends too early")
