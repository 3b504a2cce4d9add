"""Checksums of files: sizes and CRC-32 that a description lists, and what they say of a folder."""

import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from varjax.core.errors import UserError, some
from varjax.storage import ordinary


def check_records(where, records, entry: str = "files") -> None:
    """Raises `UserError` unless these are paths inside a folder with size and crc32."""
    for name, record in records.items() if isinstance(records, dict) else [("the entry", records)]:
        path = PurePosixPath(name)
        inside = path.parts and not path.is_absolute() and ".." not in path.parts
        complete = isinstance(record, dict) and {"size", "crc32"} <= record.keys()
        if not (inside and complete):
            raise UserError(
                f"{where}, entry {entry!r}: {name!r:.60} has the record {record!r:.60}; needed are"
                " paths inside the folder, each with size and crc32: copy or convert it again"
            )


def file_records(folder: Path) -> dict[str, dict]:
    """{relative path: size and CRC-32} of all `own_files` below `folder`."""
    return {name: record(folder / name) for name in own_files(folder)}


def own_files(folder: Path) -> list[str]:
    """Relative paths of the files below a folder, without what systems have put there."""
    paths = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]
    return [path.as_posix() for path in paths if not any(map(ordinary.is_hidden, path.parts))]


def record(file: Path) -> dict:
    """Size and CRC-32 of a file. (Orbax's chunks of values carry no checksum.)"""
    size = value = 0
    with ordinary.opened(file) as stream:
        while data := stream.read(2**24):
            size, value = size + len(data), zlib.crc32(data, value)
    return {"size": size, "crc32": f"{value:08x}"}


def check_files(
    folder: Path,
    records: Mapping[str, Mapping],
    advice: str = "copy them again",
    within: str | None = None,
) -> None:
    """Raises `UserError`, which names every file that is missing or was altered. within: the folder
    in `folder` in which every file but hidden ones needs a record."""
    problems = [_problem(folder / name, name, record) for name, record in records.items()]
    if not any(problems) and within is not None:
        names = [
            n for n in own_files(folder / within) if (Path(within) / n).as_posix() not in records
        ]
        problems = [f"there is no checksum of {some(names, 3)}"] if names else []
    if any(problems) or not folder.is_dir():
        listed = some(filter(None, problems), between="; ") or "the folder is missing"
        raise UserError(f"the parameters in {folder} are damaged or incomplete: {listed}; {advice}")


def _problem(file: Path, name: str, expected: Mapping) -> str | None:
    try:
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != expected["size"]:  # known before the whole file is read
            return f"{name} has {size} bytes instead of {expected['size']}"
        return None if record(file) == expected else f"{name} has been altered"
    except (OSError, ValueError) as error:  # as a name that is too long, or a NUL in it
        return f"{name!r:.60} cannot be read ({error!s:.80})"
