"""Progress lines on standard error, and estimates of the time that is left."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from varjax.core.errors import UserError, show
from varjax.generation import hosts

RECENT = 10  # reports that an estimate uses


class Progress:
    """Plain lines `what 3/8  12.3 s, about 20 s left` on standard error.

    The time left follows from the last `RECENT` reports. The first one counts only until there is a
    second one, because it includes work that is done once, such as compiling.

    Args:
      what: what is counted, for example "images".
      total: how many there will be.
      first: how many were finished before (a resumed run).
      every: seconds that must pass between two lines; the last line is always printed.
      stream: where to print, standard error by default.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        first: int = 0,
        every: float = 0.0,
        stream: TextIO | None = None,
    ):
        self.what, self.total, self.every, self.last = what, total, every, (0.0, first)
        self.stream = sys.stderr if stream is None else stream
        self.start, self.printed = time.monotonic(), -float("inf")
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)  # (seconds, count)
        self._reports = 0

    def update(self, done: int, note: str = "") -> None:
        """Report that `done` of `total` are finished."""
        line, now = self.line(done, note), time.monotonic()
        if done >= self.total or now - self.printed >= self.every:
            self.printed = now
            self.note(line)

    def report(self, done: int, total: int) -> None:
        """Report that `done` are finished of so many, where the total was not known before."""
        self.total = total
        self.update(done)

    def line(self, done: int, note: str = "") -> str:
        """Note that `done` of `total` are finished, and return the line that says so."""
        elapsed, (since, before) = time.monotonic() - self.start, self.last
        if done > before:
            if self._reports == 1:
                self._recent.clear()
            self._recent.append((elapsed - since, done - before))
            self._reports += 1
            self.last = elapsed, done
        line = f"{self.what} {done}/{self.total}  {elapsed:.1f} s"
        if self._recent and done < self.total:
            seconds, count = (sum(part) for part in zip(*self._recent, strict=True))
            line += f", about {show_seconds((self.total - done) * seconds / count)} left"
        return f"{line}  {note}" if note else line

    def skip(self) -> float:
        """Leave the time since the last report, as of compiling, out of estimates; return now."""
        self.last = (now := time.monotonic()) - self.start, self.last[1]
        return now

    def note(self, message: str) -> None:
        """Print one line outside the count, in the first process."""
        if hosts.is_first():
            print(message, file=self.stream, flush=True)


def show_seconds(seconds: float) -> str:
    """Write seconds in the unit that people would choose: 90 s, 3 min, 2.5 h, 3 days."""
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 99.5 * size:
            return f"{seconds / size:.0f} {unit}"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"


def reporter(progress: bool | Callable[[int, int], None], what: str) -> Callable[[int, int], None]:
    """Turn the argument `progress` of the Python API into a function of (done, total): False into
    one that does nothing, True into one that prints lines on standard error; a function stays.
    `UserError` for anything else. what: what is counted, for the lines."""
    if callable(progress):
        return progress
    if not isinstance(progress, bool):
        raise UserError(f"progress={show(progress)}: give True, False, or a function (done, total)")
    if not progress:
        return lambda done, total: None
    return Progress(what, 0).report
