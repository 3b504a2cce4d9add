"""Segments: runs of consecutive scales that share one padded length, so that one scan serves each.

A segment pads its scales to its own longest one. One segment is the smallest program and the most
padding; as many segments as scales is the largest program and no padding. The planner finds, by
dynamic programming on the host, the cut with the fewest padded tokens.

Letters: K scales, S scales of a segment, T padded tokens of each of them.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varjax.errors import UserError
from varjax.schedule import Schedule

AUTO = "auto"
AUTO_OVERHEAD = (
    5,
    4,
)  # "auto" accepts up to 5/4 of the exact token count; integers, so 1.25x exactly is still in


@dataclass(frozen=True)
class Segment:
    """Scales `start` <= k < `stop`, each padded to `length` tokens (the longest among them)."""

    start: int
    stop: int
    length: int

    @property
    def num_scales(self) -> int:
        return self.stop - self.start

    @property
    def scales(self) -> range:
        return range(self.start, self.stop)


def plan_segments(schedule: Schedule, segments: int | str = AUTO) -> tuple[Segment, ...]:
    """Cut the scales into contiguous segments with the fewest padded tokens.

    Args:
      schedule: the K token maps.
      segments: how many (an int or its text), or "auto": the fewest whose padded tokens are at
        most 1.25x the exact count.

    Returns:
      The segments in order; together they cover scales 0..K-1. Among equal cuts the last segment
      that starts later is taken, so the answer is always the same.

    Raises:
      UserError: not "auto" and not a whole number from 1 to K.
    """
    costs, cuts = _best_cuts(schedule.tokens)
    count = _parse_count(segments, schedule.num_scales)
    if count is None:
        more, than = AUTO_OVERHEAD
        exact = schedule.total_tokens
        count = next(n for n, row in enumerate(costs) if row[-1] * than <= exact * more)
    return _follow(schedule.tokens, cuts, count)


def padded_tokens(segments: Sequence[Segment]) -> int:
    """Tokens that all scales of all segments take, padding included."""
    return sum(segment.num_scales * segment.length for segment in segments)


def lengths(schedule: Schedule, segment: Segment) -> np.ndarray:
    """int32 [S]: real tokens of each scale of the segment."""
    return np.array(schedule.tokens[segment.start : segment.stop], np.int32)


def token_index(schedule: Schedule, segment: Segment) -> np.ndarray:
    """int32 [S, T]: global position of every padded token; padding repeats the scale's last."""
    starts = np.array(schedule.starts[segment.start : segment.stop])
    last = lengths(schedule, segment) - 1
    local = np.minimum(np.arange(segment.length)[None], last[:, None])
    return (starts[:, None] + local).astype(np.int32)


def _parse_count(segments: int | str, num_scales: int) -> int | None:
    """Number of segments; None for "auto"."""
    if segments == AUTO:
        return None
    try:
        count = int(segments) if isinstance(segments, str) else operator.index(segments)
    except (TypeError, ValueError):
        count = 0
    if isinstance(segments, bool) or not 1 <= count <= num_scales:
        raise UserError(
            f"segments={segments!r} is not valid for a schedule of {num_scales} scales: "
            f"give {AUTO!r} or a whole number from 1 to {num_scales}"
        )
    return count


def _best_cuts(tokens: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
    """Tables [n segments][first k scales]: fewest padded tokens; start of the last segment."""
    num_scales = len(tokens)
    costs = [[0.0] + [float("inf")] * num_scales]
    cuts = [[0] * (num_scales + 1)]
    for n in range(1, num_scales + 1):
        cost, cut = [float("inf")] * (num_scales + 1), [0] * (num_scales + 1)
        for stop in range(n, num_scales + 1):
            options = _last_segments(tokens, costs[n - 1], n - 1, stop)
            cost[stop], cut[stop] = min(options, key=lambda option: (option[0], -option[1]))
        costs.append(cost)
        cuts.append(cut)
    return costs, cuts


def _last_segments(tokens, before: list[float], first: int, stop: int) -> list[tuple[float, int]]:
    """(padded tokens, start) for every segment [start, stop) with start >= `first`."""
    options, longest = [], 0
    for start in range(stop - 1, first - 1, -1):
        longest = max(longest, tokens[start])
        options.append((before[start] + (stop - start) * longest, start))
    return options


def _follow(tokens: Sequence[int], cuts: list[list[int]], count: int) -> tuple[Segment, ...]:
    """Read the segments off the table, from the last to the first."""
    segments, stop = [], len(tokens)
    for n in range(count, 0, -1):
        start = cuts[n][stop]
        segments.append(Segment(start, stop, max(tokens[start:stop])))
        stop = start
    return tuple(reversed(segments))
