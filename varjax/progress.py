"""Progress lines on standard error, and how much time is left."""

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from varjax.errors import UserError, show

RECENT = 10  # measurements of a kind of work that count


class Progress:
    """Plain lines `what 3/8  12.3 s, about 20 s left` on standard error.

    Args:
      what: what is counted, for example "images".
      total: how many there will be.
      first: how many of them were there before (a resumed run).
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
        """Report that `done` of `total` are ready."""
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
        """Print one line outside the count, for example that a compilation started."""
        print(message, file=self.stream, flush=True)


class TimeLeft:
    """How long work of several kinds will take, from the latest measurements of each kind.

    The first one counts only until there is a second: it took work that is done once too, such as
    compiling.
    """

    def __init__(self):
        self._found: dict[str, deque[tuple[float, int]]] = {}  # (seconds, units)
        self._once: set[str] = set()  # kinds that were measured once

    def measured(self, kind: str, seconds: float, count: int = 1) -> None:
        """`count` units of a kind took so long together."""
        found = self._found.setdefault(kind, deque(maxlen=RECENT))
        if kind in self._once:
            self._once.remove(kind)
            found.clear()
        elif not found:
            self._once.add(kind)
        found.append((seconds, count))

    def seconds(self, **ahead: int) -> tuple[float, bool]:
        """(seconds of so many units of each kind, whether all kinds are known)."""
        total, complete = 0.0, True
        for kind, count in ahead.items():
            found = self._found.get(kind, ())
            units = sum(n for _, n in found)
            total += count * sum(s for s, _ in found) / units if units else 0.0
            complete &= bool(units) or not count
        return total, complete

    def text(self, **ahead: int) -> str:
        """`about 3 min left`; `at least` where a kind was never measured; empty if nothing is
        ahead, or nothing is known."""
        seconds, complete = self.seconds(**ahead)
        if not any(ahead.values()) or not (seconds or complete):
            return ""
        return f"{'about' if complete else 'at least'} {show_seconds(seconds)} left"


def show_seconds(seconds: float) -> str:
    """In the unit that people would choose: 90 s, 3 min, 2.5 h, 3 days."""
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 99.5 * size:
            return f"{seconds / size:.0f} {unit}"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"


def _takes_two(function: object) -> bool:
    """Whether it can be called with (done, total), as far as it says; types that do not say what
    they take, such as int, make something else of two numbers."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(0, 1)
    except ValueError:  # it says nothing
        return not isinstance(function, type)
    except TypeError:
        return False
    return True


def reporter(progress: bool | Callable[[int, int], None], what: str) -> Callable[[int, int], None]:
    """What an argument `progress` of the Python API means, as a function of (done, total): nothing
    for False, lines on standard error for True, else the given function.

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
