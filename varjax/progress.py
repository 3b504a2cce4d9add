"""Progress lines on standard error."""

import sys
import time
from typing import TextIO


class Progress:
    """Plain lines `what 3/8  12.3 s, about 20 s left` on standard error.

    Args:
      what: what is counted, for example "images".
      total: how many there will be.
      first: how many of them were there before (a resumed run).
      quiet: print nothing.
      every: seconds that must pass between two lines; the last line is always printed.
      stream: where to print, standard error by default.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        first: int = 0,
        quiet: bool = False,
        every: float = 0.0,
        stream: TextIO | None = None,
    ):
        self.what, self.total, self.quiet, self.every = what, total, quiet, every
        self.stream = sys.stderr if stream is None else stream
        self.start = time.monotonic()
        self.printed = -float("inf")
        self.pace_from = (0.0, first)  # seconds and count that the pace is measured from

    def update(self, done: int, note: str = "") -> None:
        """Report that `done` of `total` are ready."""
        elapsed = time.monotonic() - self.start
        since, before = self.pace_from
        if done > before and not since:  # the first ones took compilation too: not the usual pace
            self.pace_from = (elapsed, done)
        if self.quiet or (done < self.total and elapsed - self.printed < self.every):
            return
        self.printed = elapsed
        line = f"{self.what} {done}/{self.total}  {elapsed:.1f} s"
        if before < done < self.total:
            rest = (elapsed - since) / (done - before) * (self.total - done)
            line += f", about {rest:.0f} s left"
        self.note(f"{line}  {note}" if note else line)

    def note(self, message: str) -> None:
        """Print one line outside the count, for example that a compilation started."""
        if not self.quiet:
            print(message, file=self.stream, flush=True)
