"""The largest batch that fits a chip, from few compilations.

Memory grows almost in proportion to the batch, so a line through what is known says where to look
next; the compiler has the last word. A refused program counts with what it asked for.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

RESOLUTION = 0.01  # of the batch: about what is worth another compilation
MOST_TRIALS = 16


class Trial(NamedTuple):
    """The result of compiling for a batch. fits: whether `num_bytes` fit in the chip's memory."""

    batch: int
    num_bytes: int
    fits: bool


def largest_batch(
    attempt: Callable[[int], Trial], memory: int, first: int, step: int = 1
) -> tuple[int, list[Trial]]:
    """The largest batch that fits, and all trials in order; 0 if not even one step fits.

    The answer was compiled and fits. The next batch that was looked at does not fit; it is 1 %
    larger, at least one step.

    Args:
      attempt: compiles for a batch.
      memory: bytes of the chip.
      first: the batch to begin with.
      step: batches are its multiples, as many devices split them.
    """
    trials, batch, low, high = [], max(step, first // step * step), 0, None
    while len(trials) < MOST_TRIALS:
        trials.append(attempt(batch))
        if trials[-1].fits:
            low = batch
        else:
            high = batch
        gap = max(step, int(low * RESOLUTION) // step * step)
        if high is not None and high - low <= gap:
            break
        # at the end of the line, or just above a batch that fits
        batch = _end_of_line(trials, memory) or (2 * low if high is None else (low + high) / 2)
        batch = max(int(batch) // step * step, low + gap if low else step)
        # a line from small batches may be far off
        batch = min(batch, 8 * max(low, step) if high is None else high - step)
    return low, trials


def _end_of_line(trials: Sequence[Trial], memory: int) -> float | None:
    """The batch at which a line through the two trials nearest to the limit reaches it."""
    near = sorted(trials, key=lambda t: abs(t.num_bytes - memory))[:2]
    if len(near) < 2 or near[0].batch == near[1].batch:
        return None
    a, b = sorted(near)
    slope = (b.num_bytes - a.num_bytes) / (b.batch - a.batch)
    return a.batch + (memory - a.num_bytes) / slope if slope > 0 else None
