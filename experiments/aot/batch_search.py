"""The largest batch that fits a chip, from few compilations.

Memory grows almost in proportion to the batch, so a line through what is known says where to look
next; the compiler has the last word. A refused program counts with what it asked for.
"""

from collections.abc import Callable
from typing import NamedTuple

RESOLUTION = 0.01  # of the batch: about what is worth another compilation
MOST_TRIALS = 16


class Trial(NamedTuple):
    """The result of compiling for a batch. fits: whether `num_bytes` fit in the chip's memory."""

    batch: int
    num_bytes: int
    fits: bool


class BatchSearch:
    """Trials of batches that are multiples of `step`, the number of devices that split a batch.

    attempt: compiles for a batch. memory: bytes of the chip. trials: in order.
    """

    def __init__(self, attempt: Callable[[int], Trial], memory: int, step: int = 1):
        self.attempt, self.memory, self.step = attempt, memory, step
        self.trials: list[Trial] = []

    def largest(self, first: int) -> int:
        """The largest batch that fits, beginning with `first`; 0 if not even one step fits.

        The answer was compiled and fits. The next batch that was looked at does not fit; it is 1 %
        larger, at least one step.
        """
        self._try(max(self.step, first // self.step * self.step))
        while len(self.trials) < MOST_TRIALS:
            low, high = self._low, self._high
            if high is not None and high - low <= self._gap:
                return low
            self._try(self._next(low, high))
        return self._low

    @property
    def _low(self) -> int:
        """The largest batch that is known to fit, or 0."""
        return max((t.batch for t in self.trials if t.fits), default=0)

    @property
    def _high(self) -> int | None:
        """The smallest batch above `_low` that is known not to fit."""
        low = self._low
        above = (t.batch for t in self.trials if not t.fits and t.batch > low)
        return min(above, default=None)

    @property
    def _gap(self) -> int:
        """Batches between `_low` and what is worth a compilation."""
        return max(self.step, int(self._low * RESOLUTION) // self.step * self.step)

    def _try(self, batch: int) -> None:
        self.trials.append(self.attempt(batch))

    def _next(self, low: int, high: int | None) -> int:
        """Where to look: at the end of the line, or just above it once that end is known to fit."""
        guess = self._end_of_line()
        if guess is None:
            guess = 2 * low if high is None else (low + high) / 2
        guess = int(guess) // self.step * self.step
        if low:
            guess = max(guess, low + self._gap)
        if high is None:
            return min(guess, 8 * max(low, self.step))  # a line from small batches may be far off
        return max(low + self.step, min(guess, high - self.step))

    def _end_of_line(self) -> float | None:
        """The batch at which a line through the two trials nearest to the limit reaches it."""
        near = sorted(self.trials, key=lambda t: abs(t.num_bytes - self.memory))[:2]
        if len(near) < 2 or near[0].batch == near[1].batch:
            return None
        a, b = sorted(near, key=lambda t: t.batch)
        slope = (b.num_bytes - a.num_bytes) / (b.batch - a.batch)
        return a.batch + (self.memory - a.num_bytes) / slope if slope > 0 else None
