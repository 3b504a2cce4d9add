"""Ending early: the system asks one process or many, and all end together."""

import contextlib
import signal
import time

import numpy as np

from varjax.parallel import processes

ASKED = "varjax/asked_to_end"  # name of a note that processes leave each other


class Stop:
    """Whether the system has asked to end, by SIGTERM. As a context manager it listens.

    JAX has a service for this, too, which handles the signal in C++; files that appear whole
    (`varjax.storage.atomic`) handle it in Python. One handler serves both, for one process and for
    many, which ask each other now and then (`Ending`), or leave each other a note (`heard`)."""

    asked = False

    def heard(self) -> bool:
        """Return whether this process or another one was asked. It waits for nobody: processes ask
        at different times, after each piece of their own work. One that has ended its work, and
        waits for the others, is heard when they come."""
        if processes.count() == 1:
            return self.asked
        said = processes.notes()
        if self.asked:
            said.key_value_set(f"{ASKED}/{processes.index()}", "", allow_overwrite=True)
        return self.asked or bool(said.key_value_dir_get(ASKED))

    def __enter__(self) -> "Stop":
        with contextlib.suppress(ValueError):  # not in the main thread: nobody asks there
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *error) -> None:
        with contextlib.suppress(ValueError, AttributeError):
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True


class Ending:
    """Whether the system has asked one of the processes to end: all of them ask together.

    One process looks after every step. Many ask each other about every `SECONDS`: a question waits
    for the slowest, and for steps that were started ahead.

    stop: listens meanwhile. A step is whatever the processes do in step: of training, or a batch.
    """

    SECONDS = 2.0

    def __init__(self, stop: Stop):
        self._stop, self._ask_at = stop, 0
        self._asked_at, self._last = 0, time.monotonic()

    def after(self, done: int) -> bool:
        """Whether to end after `done` steps; the same in all processes. `LostProcess` if one does
        not answer."""
        if processes.count() == 1:
            return self._stop.asked
        if done < self._ask_at:
            return False
        now = time.monotonic()
        pace = (done - self._asked_at) / max(now - self._last, 1e-3)
        answers = processes.say_all(np.array([self._stop.asked, pace]))
        self._asked_at, self._last = done, now
        self._ask_at = done + max(1, int(self.SECONDS * answers[0, 1]))
        return bool(answers[:, 0].any())
