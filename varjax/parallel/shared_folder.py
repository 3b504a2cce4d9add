"""A folder that several processes work in: one of them holds it, and all see that it is the same
one."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from varjax.errors import UserError
from varjax.parallel import processes
from varjax.storage import lock

TOKEN = ".process-"  # how the file begins that all have to see
SEEN_WITHIN = (
    20.0  # seconds after which a shared file system shows what another machine has written
)


def check(folder: Path, name: str, advice: str) -> None:
    """Raise `UserError` in all processes unless all see a file that the first one makes in `folder`
    and removes.

    name: begins the name of the file. advice: what to do where they do not.
    """
    number = int(processes.say_all(np.random.default_rng().integers(10**9))[0])
    token = folder / f"{name}{number}"
    with processes.together():
        if processes.is_first():
            for left in folder.glob(f"{name}*"):  # by a process that was killed
                left.unlink(missing_ok=True)
            token.touch(exist_ok=False)  # follows no link
    try:
        with processes.together():
            _look_for(token, advice)
    finally:
        if processes.is_first():
            token.unlink(missing_ok=True)
    processes.wait()  # nobody finds it any more


def _look_for(token: Path, advice: str) -> None:
    end = time.monotonic() + SEEN_WITHIN
    while not token.exists():
        if time.monotonic() > end:
            raise UserError(f"{token.parent} is not the same folder as that of process 0: {advice}")
        time.sleep(0.2)


@contextlib.contextmanager
def held(folder: Path, message: str, advice: str) -> Iterator[None]:
    """Hold `folder` (`varjax.storage.lock`) for all processes while the block runs.

    Raises:
      UserError: in all of them, if another run holds it (`message`), or it is not one folder.
    """
    with contextlib.ExitStack() as stack:
        with processes.together():
            if processes.is_first():
                stack.enter_context(lock.held(folder, message))
        if processes.count() > 1:
            check(folder, TOKEN, advice)
        yield
