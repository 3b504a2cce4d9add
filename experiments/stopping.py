"""What a command says when the system has asked it to end (`varjax.parallel.processes.Stop`)."""

import sys

from varjax.parallel import processes


class Stopped(Exception):
    """The system has asked to end, and what was begun is stored. what: what is counted."""

    def __init__(self, done: int, total: int, what: str = "images"):
        super().__init__(f"{done} of {total} {what} are stored: resume by the same command")


def say_stopped(stopped: Stopped) -> None:
    """Say it, in one process."""
    if processes.is_first():
        print(f"ended by SIGTERM: {stopped}", file=sys.stderr, flush=True)
