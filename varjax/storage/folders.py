"""Folders that appear as a whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from varjax.errors import UserError

LONGEST_NAME = 255 - 24  # of a file system's 255 bytes, less what names in the making add


def check_absent(directory, *, overwrite: bool) -> Path:
    """Absolute path of a folder that may be created now.

    Raises:
      UserError: if it exists and may not be replaced, or its parent cannot be written.
    """
    target = check_place(directory)
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"{directory} exists already: choose another folder or add --overwrite")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
        raise UserError(f"{directory} exists and is not a folder: choose another one")
    return target


def check_place(path, *, kind: str = "folder", flag: str = "--out") -> Path:
    """Absolute path of a folder or file whose nearest existing parent can be written.

    Raises:
      UserError: an empty or impossible path, a parent that is a file or may not be written.
    """
    text = os.fsdecode(path)
    if not text.strip():
        raise UserError(f"{text!r} is no {kind}: write its name, for example {flag}={kind.upper()}")
    if "\0" in text:
        raise UserError(f"{text!r:.200} is no {kind}: names cannot hold a NUL byte")
    target = Path(os.path.abspath(text))
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in target.parts):
        raise UserError(f"{text!r:.60}... is no {kind}: names have at most {LONGEST_NAME} bytes")
    parent = next((p for p in target.parents if p.exists()), target)
    if not parent.is_dir():
        raise UserError(f"cannot write {path}: {parent} is not a folder")
    _check_writable(path, parent)
    return target


def _check_writable(path, parent: Path) -> None:
    """Permissions alone do not tell: root has them on a read-only file system and in /proc."""
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {path}: no write permission in {parent}")
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write {path}: nothing can be created in {parent} ({error.strerror})"
        ) from None


@contextlib.contextmanager
def naming(path, target: Path) -> Iterator[None]:
    """Failures of what is in the making beside `target`, under `.NAME.something`, name `path`."""
    hidden = os.path.join(target.parent, f".{target.name}.")
    try:
        yield
    except OSError as error:
        failed = hidden if error.filename is None else str(error.filename)
        if error.errno is None or not failed.startswith(hidden):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def replacing(directory, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to fill; it becomes `directory` on success and vanishes on any error.

    The folder lies beside `directory`, so that the last step is a rename. With `overwrite` the old
    content stays in place until then.
    """
    target = check_absent(directory, overwrite=overwrite)
    made = _make_parents(target)
    try:
        with naming(directory, target), _work_folder(target) as work:
            yield work
            _swap(work, target)
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: somebody else uses it now
                folder.rmdir()
        raise


@contextlib.contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that is gone afterwards, unless it was renamed."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        os.chmod(work, 0o777 & ~_umask())  # mkdtemp makes it private
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_parents(target: Path) -> list[Path]:
    """Create missing parents; returns them, deepest first."""
    missing = [p for p in target.parents if not p.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    return missing


def _swap(work: Path, target: Path) -> None:
    """Rename `work` to `target`; what was there is removed afterwards, or put back on failure."""
    if not target.exists():
        os.rename(work, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    os.rename(target, old / "old")
    try:
        os.rename(work, target)
    except OSError:
        os.rename(old / "old", target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
