"""Ending early: the system asks one process or many, and all end together."""

import contextlib
import itertools
import signal
import threading
import time

import numpy as np

from varjax.parallel import processes
from varjax.parallel.processes import LostProcess

ASKED = "asked to end"  # what processes leave each other word of


class Stop:
    """Whether the system has asked to end, by SIGTERM. As a context manager it listens.

    JAX has a service for this, too, which handles the signal in C++ (`processes` leaves it out);
    files that appear whole (`varjax.storage.atomic`) handle it in Python. One handler serves both,
    for one process and for many, which ask each other now and then (`Ending`), or leave each other
    word (`heard`)."""

    asked = False

    def __init__(self):
        self._pulse = Pulse()

    def heard(self) -> bool:
        """Return whether this process or another one was asked. It waits for nobody: processes ask
        at different times, after each piece of their own work."""
        self._pulse.check()
        if self.asked:
            processes.post(ASKED, "now")
        return self.asked or bool(processes.posted(ASKED))

    def __enter__(self) -> "Stop":
        with contextlib.suppress(ValueError):  # not in the main thread: nobody asks there
            self._before = signal.signal(signal.SIGTERM, self._ask)
        self._pulse.start()
        return self

    def __exit__(self, *error) -> None:
        self._pulse.end()
        with contextlib.suppress(ValueError, AttributeError):
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True


class Pulse:
    """Says now and then that this process lives, and notices who has stopped saying so. JAX's own
    heartbeats end the process later, by a signal and without a line for people."""

    EVERY_S, LOST_S = 5.0, 25.0  # less than `processes.HEARTBEAT_S`
    TOPIC = "lives"

    def __init__(self):
        self._over, self._thread = threading.Event(), None
        self._last: dict[str, tuple[str, float]] = {}  # by process: what it said last, and when

    def start(self) -> None:
        if processes.count() > 1:
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        beats = itertools.count()
        while not self._over.is_set():
            with contextlib.suppress(Exception):  # `check` and exchanges say what is wrong
                processes.post(self.TOPIC, f"{processes.index()} {next(beats)}")
            self._over.wait(self.EVERY_S)

    def end(self) -> None:
        """From now on silence means nothing."""
        self._over.set()
        if self._thread:
            self._thread.join()  # its last word must not come after this one
        with contextlib.suppress(LostProcess):
            processes.post(self.TOPIC, f"{processes.index()} over")

    def check(self) -> None:
        """Raise `LostProcess` if a process is silent that had begun and not ended."""
        now = time.monotonic()
        for process, said in map(str.split, processes.posted(self.TOPIC)):
            before, since = self._last.get(process, (None, now))
            if said != before:
                self._last[process] = said, now
            elif said != "over" and now - since > self.LOST_S:
                silent = f"process {process} has said nothing for {now - since:.0f} s"
                raise LostProcess(processes.LOST.format(silent))


class Ending:
    """Whether the system has asked one of the processes to end.

    One process looks after every step, and so do many that are not in step. Those in step end
    after the same one, so that they ask each other, about every `SECONDS`: a question waits for
    the slowest, and for steps that were started ahead.

    stop: listens meanwhile. A step is of training, or a batch.
    in_step: whether a step is one program of all processes.
    """

    SECONDS = 2.0
    FASTER = 4  # times as many steps between questions as before, at most

    def __init__(self, stop: Stop, in_step: bool = True):
        self._stop, self._in_step = stop, in_step
        self._interval = self._left = 1  # steps between two questions, and until the next one
        self._answered, self._pace = None, 0.0  # when, and steps per second between two answers

    def after_step(self, last: bool = False) -> bool:
        """Whether to end now; in step the same in all processes. `LostProcess` if one does not
        answer.

        last: no step follows, so that they ask in any case.
        """
        if processes.count() == 1 or not self._in_step:
            return self._stop.heard()
        self._left -= 1
        if self._left and not last:
            return False
        # the pace of whole intervals: an answer waits for steps that were only started before
        answers = processes.say_all(np.array([self._stop.asked, self._pace]))
        now, steps = time.monotonic(), self._interval - self._left
        if self._answered is not None:
            self._pace = steps / max(now - self._answered, 1e-3)
        self._answered = now
        wanted = int(self.SECONDS * answers[0, 1])
        self._interval = self._left = max(1, min(wanted, self.FASTER * self._interval))
        return bool(answers[:, 0].any())
