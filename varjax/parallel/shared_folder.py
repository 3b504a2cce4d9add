"""A folder that several processes work in: one of them holds it, and all see that it is the same
one."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from varjax.errors import UserError
from varjax.parallel import processes
from varjax.storage import lock

# Seconds after which a shared file system shows what another machine has written.
SEEN_WITHIN = 20.0


@contextlib.contextmanager
def held(folder: Path, message: str, advice: str) -> Iterator[None]:
    """Hold `folder` (`varjax.storage.lock`) for all processes while the block runs.

    Raises:
      UserError: in all of them, if another run holds it (`message`), or it is not one folder
        (`advice`).
    """
    with contextlib.ExitStack() as stack:
        with processes.together():
            if processes.is_first():
                stack.enter_context(lock.held(folder, message))
        with processes.together():
            _look_for(folder / lock.NAME, advice)
        yield


def _look_for(file: Path, advice: str) -> None:
    """Wait until this process sees the file of the first one. `UserError` if it does not."""
    end = time.monotonic() + SEEN_WITHIN
    while not file.exists():
        if time.monotonic() > end:
            raise UserError(f"{file.parent} is not the same folder as that of process 0: {advice}")
        time.sleep(0.2)
