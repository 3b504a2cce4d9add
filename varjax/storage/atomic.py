"""Files and folders that appear complete or not at all.

The content is written beside its place under a hidden name, `.NAME.something`, and renamed when it
is complete, so that a reader sees the old content or the new one.
"""

import contextlib
import os
import shutil
import signal
import stat
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import jax

from varjax.core.errors import UserError
from varjax.storage import ordinary

LONGEST_NAME = 255 - 24  # bytes that a file system allows, less what hidden names add
LONGEST_PATH = 4096 - 1024  # bytes that a file system allows, less what is written inside
DESKTOP = {".DS_Store", "Thumbs.db", "desktop.ini"}  # what file managers put into folders

# A function that says which files this command wrote into a folder, as `a/b` below it; None: the
# folder is not from this command.
Written = Callable[[Path], Collection[str] | None]


def check_new_file(path: str | os.PathLike, *, overwrite: bool, flag: str = "path") -> Path:
    """`path` as it was given, if a file may be written there now. flag: its name in messages.
    `UserError`: it exists and may not be replaced or is no file; its folder does not exist or
    cannot be written."""
    target = check_place(path, kind="file", flag=flag)
    if os.path.lexists(target) and not overwrite and not target.is_dir():
        raise UserError(f"{path} exists already: choose another file or set overwrite")
    if target.exists() and not target.is_file():
        what = "a folder: name a file" if target.is_dir() else "no ordinary file: choose another"
        raise UserError(f"{flag}={path} is {what}")
    if not target.parent.is_dir():
        raise UserError(f"{flag}={path}: there is no folder {target.parent}: create it first")
    return Path(path)


def check_new_folder(
    path: str | os.PathLike, *, replaces: Written | None = None, flag: str = "path"
) -> Path:
    """Absolute path of a folder that may be created now. flag: its name in messages. `UserError`:
    it exists and may not be replaced, or its parent cannot be written.

    replaces: names the files that were written into an older folder. That folder may be replaced if
      it holds nothing but these files, the folders that lead to them, and no links. None: there may
      be no older folder.
    """
    target = check_place(path, kind="folder", flag=flag)
    if os.path.lexists(target) and replaces is None:
        raise UserError(f"{path} exists already: choose another folder or set overwrite")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
        raise UserError(f"{path} exists and is not a folder: choose another one")
    if not target.exists():
        return target
    if foreign := next(_foreign(target, set(replaces(target) or ())), None):
        raise UserError(
            f"{path} holds {foreign!a:.80} and is not replaced: nothing there says that this"
            " command wrote that; move it away or choose another folder"
        )
    return target


def _foreign(folder: Path, written: set[str]) -> Iterator[str]:
    """Files and folders below a folder that were not written there. Links are not followed.
    `OSError` if a folder in it cannot be read."""
    leading = {str(above) for name in written for above in PurePosixPath(name).parents}
    for place, folders, files in os.walk(folder, onerror=ordinary.refuse):
        for name in sorted(folders + files):
            path = Path(place, name)
            below, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode
            plain = stat.S_ISREG(mode) and (below in written or name in DESKTOP)
            if not plain and not (stat.S_ISDIR(mode) and below in leading):
                yield below


def check_place(path: str | os.PathLike, *, kind: str = "folder", flag: str = "path") -> Path:
    """Absolute path of a file or folder (`kind`) whose nearest existing parent can be written.
    `UserError`: an empty or impossible path, a parent that is a file or may not be written."""
    text = os.fsdecode(path)
    if not text.strip():
        raise UserError(f"{text!r} is no {kind}: write its name, for example {flag}={kind.upper()}")
    if "\0" in text:
        raise UserError(f"{text!r:.200} is no {kind}: names cannot hold a NUL byte")
    target = Path(os.path.abspath(text))
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in target.parts):
        raise UserError(f"{text!r:.60}... is no {kind}: names have at most {LONGEST_NAME} bytes")
    if len(os.fsencode(target)) > LONGEST_PATH:
        raise UserError(f"{text!r:.60}... is no {kind}: paths have at most {LONGEST_PATH} bytes")
    parent = next((p for p in target.parents if p.exists()), target)
    if not parent.is_dir():
        raise UserError(f"cannot write {path}: {parent} is not a folder")
    try:  # asking for permissions is not enough: root has them even on a read-only file system
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise UserError(
            f"cannot write {path}: nothing can be created in {parent} ({error.strerror})"
        ) from None
    return target


@contextlib.contextmanager
def new_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A binary file to fill, which becomes `path` on success and vanishes on any error. `OSError`:
    no such folder, no write permission, no space left."""
    target = Path(path)
    work = _hidden(target)
    with _errors_name(path, target), exits_when_terminated():
        file = open(work, "xb")  # follows no link
        try:
            with file:
                yield file
            os.replace(work, target)
        finally:
            work.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file in UTF-8. Half of a surrogate pair, which is no character, is written as
    \\udXXX, as JSON has it. `OSError` as `new_file`."""
    with new_file(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, *, replaces: Written | None = None) -> Iterator[Path]:
    """An empty folder to fill, which becomes `path` on success and vanishes on any error.
    `UserError`: see `check_new_folder`. `OSError`: no space is left.

    An old folder, which `replaces` must know (`check_new_folder`), stays in place until the new one
    is complete.
    """
    target = check_new_folder(path, replaces=replaces)
    made = [parent for parent in target.parents if not parent.exists()]  # deepest first
    target.parent.mkdir(parents=True, exist_ok=True)
    work = _hidden(target)
    try:
        with _errors_name(path, target), exits_when_terminated():
            work.mkdir()
            yield work
            check_new_folder(path, replaces=replaces)  # somebody may have been here since
            _swap(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: somebody else uses it now
                folder.rmdir()
        raise


@contextlib.contextmanager
def _errors_name(path: str | os.PathLike, target: Path) -> Iterator[None]:
    """Errors about the hidden file or folder name the `path` that the user gave."""
    hidden = os.path.join(target.parent, f".{target.name}.")
    try:
        yield
    except OSError as error:
        failed = hidden if error.filename is None else str(error.filename)
        if error.errno is None or not failed.startswith(hidden):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def exits_when_terminated() -> Iterator[None]:
    """SIGTERM, which `kill` and schedulers send, ends the process by an exception here, so that
    hidden files are removed and started processes ended. Where somebody else handles it, as JAX
    does of many processes, and in other threads, nothing changes."""

    def exit_(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # the status that shells show for the signal

    ours = threading.current_thread() is threading.main_thread()
    ours &= not jax.distributed.is_initialized()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, exit_)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _swap(work: Path, target: Path) -> None:
    """Renames `work` to `target`; what was there is removed afterwards, or put back on failure."""
    if not target.exists():
        os.rename(work, target)
        return
    old = _hidden(target)
    os.rename(target, old)
    try:
        os.rename(work, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _hidden(target: Path) -> Path:
    """A name beside `target` that nobody else uses."""
    return target.with_name(f".{target.name}.{uuid.uuid4().int % 10**16}")
