"""The largest batch that fits a chip, from few compilations.

Memory grows almost in proportion to the batch, so a line through what is known says where to look
next; the compiler has the last word. A refused program counts with what it asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass

RESOLUTION = 0.01  # of the batch: about what is worth another compilation
MOST_TRIALS = 16


@dataclass(frozen=True)
class Trial:
    """batch: images. num_bytes: what the program needs. fits: in the chip's memory."""

    batch: int
    num_bytes: int
    fits: bool


def largest_batch(
    attempt: Callable[[int], Trial], memory: int, *, first: int, step: int = 1
) -> tuple[int, list[Trial]]:
    """The largest multiple of `step` that fits, and all trials in order.

    `attempt` compiles for a batch. The answer fits, and the next batch that the search looks at
    does not: 1 % larger, at least one step. 0 if not even one step fits.

    Args:
      memory: bytes of the chip.
      first: batch to begin with.
      step: what a batch is a multiple of (devices that split it).
    """
    trials = [attempt(max(step, first // step * step))]
    while len(trials) < MOST_TRIALS:
        low = max((t.batch for t in trials if t.fits), default=0)
        high = min((t.batch for t in trials if not t.fits and t.batch > low), default=None)
        gap = max(step, int(low * RESOLUTION) // step * step)
        if high is not None and high - low <= gap:
            return low, trials
        trials.append(attempt(_next(trials, memory, low, high, gap, step)))
    return max((t.batch for t in trials if t.fits), default=0), trials


def _next(trials, memory: int, low: int, high: int | None, gap: int, step: int) -> int:
    """Where to look: at the end of the line, or just above it once that end is known to fit."""
    guess = _line(trials, memory)
    if guess is None:
        guess = 2 * low if high is None else (low + high) / 2
    guess = int(guess) // step * step
    if low and guess < low + gap:  # whether what lies between fits is not worth a compilation
        guess = low + gap
    if high is None:
        return min(guess, 8 * max(low, step))  # a line from small batches may be far off
    return max(low + step, min(guess, high - step))


def _line(trials, memory: int) -> float | None:
    """The batch at which a line through the two trials nearest to the limit reaches it."""
    near = sorted(trials, key=lambda t: abs(t.num_bytes - memory))[:2]
    if len(near) < 2 or near[0].batch == near[1].batch:
        return None
    a, b = sorted(near, key=lambda t: t.batch)
    slope = (b.num_bytes - a.num_bytes) / (b.batch - a.batch)
    return a.batch + (memory - a.num_bytes) / slope if slope > 0 else None
