"""Progress lines on standard error, and estimates of the time that is left."""

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from varjax.errors import UserError, show
from varjax.parallel import processes

RECENT = 10  # measurements of each kind of work that an estimate uses


class Progress:
    """Plain lines `what 3/8  12.3 s, about 20 s left` on standard error.

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
        self.start, self.printed, self.ahead = time.monotonic(), -float("inf"), TimeLeft()

    def update(self, done: int, note: str = "") -> None:
        """Report that `done` of `total` are finished."""
        elapsed = time.monotonic() - self.start
        since, before = self.last
        if done > before:
            self.ahead.measured("one", elapsed - since, done - before)
            self.last = (elapsed, done)
        if done < self.total and elapsed - self.printed < self.every:
            return
        self.printed = elapsed
        line = f"{self.what} {done}/{self.total}  {elapsed:.1f} s"
        if left := self.ahead.text(one=self.total - done):
            line += f", {left}"
        self.note(f"{line}  {note}" if note else line)

    def note(self, message: str) -> None:
        """Print one line outside the count, for example that a compilation started, in the first
        process."""
        if processes.is_first():
            print(message, file=self.stream, flush=True)


class TimeLeft:
    """Estimates how long several kinds of work will take, from recent measurements of each kind.

    The first measurement of a kind counts only until there is a second one, because it includes
    work that is done once, such as compiling.
    """

    def __init__(self):
        self._recent: dict[str, deque[tuple[float, int]]] = {}  # (seconds, units)
        self._measured_once: set[str] = set()  # kinds that were measured once

    def measured(self, kind: str, seconds: float, count: int = 1) -> None:
        """Note that `count` units of a kind took `seconds` together."""
        found = self._recent.setdefault(kind, deque(maxlen=RECENT))
        if kind in self._measured_once:
            self._measured_once.remove(kind)
            found.clear()
        elif not found:
            self._measured_once.add(kind)
        found.append((seconds, count))

    def seconds(self, **ahead: int) -> tuple[float, bool]:
        """Estimate so many units of each kind: (seconds, whether all kinds are known)."""
        total, complete = 0.0, True
        for kind, count in ahead.items():
            found = self._recent.get(kind, ())
            units = sum(n for _, n in found)
            total += count * sum(s for s, _ in found) / units if units else 0.0
            complete &= bool(units) or not count
        return total, complete

    def text(self, **ahead: int) -> str:
        """Return `about 3 min left`, or `at least 3 min left` where a kind was never measured. The
        text is empty if nothing is ahead or nothing is known."""
        seconds, complete = self.seconds(**ahead)
        if not any(ahead.values()) or not (seconds or complete):
            return ""
        return f"{'about' if complete else 'at least'} {show_seconds(seconds)} left"


def show_seconds(seconds: float) -> str:
    """Write seconds in the unit that people would choose: 90 s, 3 min, 2.5 h, 3 days."""
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 99.5 * size:
            return f"{seconds / size:.0f} {unit}"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"


def _takes_two(function: object) -> bool:
    """Whether a function can be called with (done, total), as far as its signature tells.

    A type without a signature, such as int, would make something else of two numbers.
    """
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(0, 1)
    except ValueError:  # it has no signature
        return not isinstance(function, type)
    except TypeError:
        return False
    return True


def reporter(progress: bool | Callable[[int, int], None], what: str) -> Callable[[int, int], None]:
    """Turn the argument `progress` of the Python API into a function of (done, total).

    Args:
      progress: False for a function that does nothing, True for one that prints lines on standard
        error, or the function itself.
      what: what is counted, for the lines.

    Raises:
      UserError: it is none of them.
    """
    if _takes_two(progress):
        return progress
    if not isinstance(progress, bool):
        raise UserError(f"progress={show(progress)}: give True, False, or a function (done, total)")
    if not progress:
        return lambda done, total: None
    lines = Progress(what, 0)

    def report(done: int, total: int) -> None:
        lines.total = total
        lines.update(done)

    return report
