"""The process of `experiments.bench --machine` that uses the device ends with the one that watches.

It is in a session of its own, so a closed terminal does not reach it, and nothing reaches it when
the other process is killed. A device that it keeps would be shared with the next run. So its
standard input is a pipe whose other end is open in the watching process only: the system closes
that, however the process ends.
"""

import os
import signal
import stat
import threading


def end_with_parent() -> None:
    """End this process and what it has started as soon as standard input, if it is a pipe, is
    closed at the other end; also while a kernel runs."""
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    while os.read(0, 4096):
        pass  # nothing is ever said; and nobody is left to be told
    if os.getpgrp() == os.getpid():  # a group of its own, with what it has started
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
