"""What Orbax and TensorStore raise, in words that name the folder."""

import contextlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from varjax.errors import UserError


@contextlib.contextmanager
def failed_reading(folder: Path, advice: str = "convert or copy the checkpoint again"):
    """Whatever Orbax raises over damaged files becomes a `UserError` that names the folder."""
    try:
        with _one_report():
            yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):  # the last: device memory is full
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise UserError(
            f"cannot read the parameters in {folder}: the files are damaged or incomplete"
            f" ({reason}); {advice}"
        ) from error


@contextlib.contextmanager
def failed_writing(folder: Path):
    """What Orbax raises over a full disk and the like becomes an `OSError` that names the new
    `folder`. Nothing is left of the folder then."""
    try:
        with _one_report():
            yield
    except BaseException as error:
        _remove(folder)
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else getattr(error, "errno", None)
        if number is None or getattr(error, "filename", None):
            raise
        raise OSError(number, os.strerror(number), os.fspath(folder)) from error


def _remove(folder: Path) -> None:
    """Remove the folder and what Orbax keeps under a temporary name. Its threads may still be
    writing, so this is tried several times."""
    for _ in range(20):
        left = [p for p in folder.parent.glob(f"{folder.name}*") if _is_of(p.name, folder.name)]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        if not left:
            return
        time.sleep(0.05)


def _is_of(name: str, folder: str) -> bool:
    return name == folder or name.startswith(f"{folder}.orbax-checkpoint-tmp")


@contextlib.contextmanager
def _one_report():
    """Report an error of Orbax once.

    After an error its threads print it several more times, and say what became of the arrays that
    were still to be written or read. They may do so after this context has ended, so the filters
    stay if an error is raised.
    """
    loggers, hook = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook
    if isinstance(hook, _WithoutOrbax):
        yield
        return
    for logger in loggers:
        logger.addFilter(_is_not_of_orbax)
    sys.unraisablehook = _WithoutOrbax(hook)
    yield
    for logger in loggers:
        logger.removeFilter(_is_not_of_orbax)
    sys.unraisablehook = hook


@dataclass(frozen=True)
class _WithoutOrbax:
    """A hook for exceptions that nobody can catch. It passes them on to `before`, except those of
    Orbax work that was abandoned."""

    before: Callable

    def __call__(self, event) -> None:
        code = getattr(event.object, "cr_code", None)  # of a coroutine
        is_orbax = "orbax" in Path(getattr(code, "co_filename", "")).parts
        if not (is_orbax or "Event loop is closed" in str(event.exc_value)):
            self.before(event)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Whether a log record comes from elsewhere. asyncio writes into its messages what was given
    up: of a task that failed, the file of its coroutine; of an operation of TensorStore that
    failed, the error, which ends with what was to be opened and with the system's number."""
    where = record.getMessage() if record.name == "asyncio" else record.pathname
    return not re.search(r"[\\/]orbax[\\/]|tensorstore_spec=|os_error_code=", where)
