"""Checksums of files: sizes and CRC-32 that a description lists, and what they say of a folder."""

import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from varjax.errors import UserError, some
from varjax.storage import ordinary


def check_records(where, records, entry: str = "files") -> None:
    """Raise `UserError` unless these are file names with size and crc32."""
    if not isinstance(records, dict):
        raise UserError(
            f"{where}, entry {entry!r} is {records!r:.60}: it must hold file names with size and"
            " crc32; copy or convert the checkpoint again"
        )
    for name, record in records.items():
        size, crc = (record.get(k) if isinstance(record, dict) else None for k in ("size", "crc32"))
        path = PurePosixPath(name)
        inside = path.parts and not path.is_absolute() and ".." not in path.parts
        is_crc = isinstance(crc, str) and re.fullmatch(r"[0-9a-f]{8}", crc)
        if not (inside and type(size) is int and size >= 0 and is_crc):
            raise UserError(
                f"{where}, entry {entry!r}: {name!r:.60} has the record {record!r:.60}; needed are"
                " a path inside the folder, its size and crc32 (8 hexadecimal digits)"
            )


def file_records(folder: Path) -> dict[str, dict]:
    """{relative path: size and CRC-32} of all files below `folder`."""
    return {f.relative_to(folder).as_posix(): record(f) for f in sorted(_files(folder, folder))}


def _files(folder: Path, root: Path) -> Iterator[Path]:
    """Give the files below a folder without what systems have put there."""
    for file in folder.rglob("*"):
        if file.is_file() and not any(map(ordinary.is_hidden, file.relative_to(root).parts)):
            yield file


def record(file: Path) -> dict:
    """Size and CRC-32 of a file."""
    return {"size": file.stat().st_size, "crc32": _crc32(file)}


def _crc32(file: Path) -> str:
    """CRC-32 of a file, in hexadecimal. Orbax itself would not notice all flipped bits: its chunks
    of values carry no checksum."""
    value = 0
    with ordinary.opened(file) as stream:
        while data := stream.read(2**24):
            value = zlib.crc32(data, value)
    return f"{value:08x}"


def check_files(
    folder: Path,
    records: Mapping[str, Mapping],
    advice: str = "copy them again",
    within: str | None = None,
) -> None:
    """Raise `UserError`, naming every parameter file that is missing or was altered. within: the
    folder in `folder` in which every file but hidden ones needs a record."""
    problems = [_problem(folder / name, name, record) for name, record in records.items()]
    if not any(problems) and within is not None:
        problems = _without_record(folder, records, within)
    if any(problems) or not folder.is_dir():
        listed = some(filter(None, problems), between="; ") or "the folder is missing"
        raise UserError(f"the parameters in {folder} are damaged or incomplete: {listed}; {advice}")


def _without_record(folder: Path, records: Mapping, within: str) -> list[str]:
    files = {f.relative_to(folder).as_posix() for f in _files(folder / within, folder)}
    names = sorted(files - records.keys())
    return [f"there is no checksum of {some(names, 3)}"] if names else []


def _problem(file: Path, name: str, record: Mapping) -> str | None:
    try:
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != record["size"]:
            return f"{name} has {size} bytes instead of {record['size']}"
        return None if _crc32(file) == record["crc32"] else f"{name} has been altered"
    except (OSError, ValueError) as error:  # as a name that is too long, or a NUL in it
        return f"{name!r:.60} cannot be read ({error!s:.80})"
