"""Errors of Orbax and TensorStore, in words that name the folder."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from varjax.errors import UserError


@contextlib.contextmanager
def failed_reading(
    folder: Path, advice: str = "convert or copy the checkpoint again"
) -> Iterator[None]:
    """Turns every error over damaged files into a `UserError` that names the folder."""
    try:
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
def failed_writing(folder: Path) -> Iterator[None]:
    """Turns an error over a full disk and the like into an `OSError` that names the new `folder`,
    of which nothing is left then."""
    try:
        yield
    except BaseException as error:
        for _ in range(20):  # Orbax's threads may still be writing
            left = [folder, *folder.parent.glob(f"{folder.name}.orbax-checkpoint-tmp*")]
            if not any(path.exists() for path in left):
                break
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.05)
        # TensorStore hides the system's number in the text of a ValueError
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else getattr(error, "errno", None)
        if number is None or getattr(error, "filename", None):
            raise
        raise OSError(number, os.strerror(number), os.fspath(folder)) from error
