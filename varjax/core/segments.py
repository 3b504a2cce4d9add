"""Cutting the work: the scales into segments, a batch into chunks.

Segments are runs of consecutive scales that share one padded length, so that one scan serves each.
A segment pads its scales to its own longest one. One segment is the smallest program and the most
padding; as many segments as scales is the largest program and no padding. The planner finds, by
dynamic programming on the host, the cut with the fewest padded tokens.

Letters: K scales, S scales of a segment, T padded tokens of each of them.

Chunks are a few images at a time, where all at once would take too much memory.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from varjax.core.sequence import AUTO, Schedule

Chunk = TypeVar("Chunk")  # a tree of arrays with a leading image axis

# "auto" accepts this much of the exact count, of a small and of a large program; integers, so that
# 1.25x exactly is still in
SMALL_OVERHEAD, LARGE_OVERHEAD = (5, 4), (21, 20)
TILE = 8  # rows that libraries multiply at once; they copy others into such
TILE_8_BITS = 16  # the same of rows in 8 bits
LOGITS_BYTES = 2**30  # logits, and what sampling from them takes, that may exist at once
ARRAYS_PER_LOGIT = 6  # both rows of guidance, guided, filtered, ordered or probabilities, noise


@dataclass(frozen=True)
class Segment:
    """Scales `start` <= k < `stop`, each padded to `length` tokens (the longest among them, or a
    few more)."""

    start: int
    stop: int
    length: int

    @property
    def scales(self) -> range:
        return range(self.start, self.stop)


def plan_segments(
    schedule: Schedule,
    segments: int | str = AUTO,
    rows: int | None = None,
    free_rows: int = 0,
    tile: int = TILE,
) -> tuple[Segment, ...]:
    """Cuts the scales into contiguous segments with the fewest padded tokens, for a large program
    into those that cost least. Together they cover scales 0..K-1, in order. Among equal cuts the
    last segment that starts later is taken, so the answer is always the same.

    segments: how many, or "auto" (`Schedule.check_cut`, whose errors are raised). With "auto" a
      small program gets the fewest segments whose padded tokens are at most 1.25x the exact count:
      another compiled body costs more than padding. A large one gets the fewest that cost at most
      1.05x what no padding would.
    rows: rows that each token has on one device. It is given for a large program, whose products
      take most of its time. Lengths are then rounded up to whole tiles of rows.
    free_rows: rows of a product that take as long as one.
    tile: rows of a tile.
    """
    # Below `free_rows` rows a product takes as long as with all of them, because it waits for the
    # weights: a scale costs at least as much as `least` tokens.
    tokens, count = tuple(schedule.tokens), schedule.check_cut(segments)
    least = free_rows / rows if rows else 0
    more, than = LARGE_OVERHEAD if rows else SMALL_OVERHEAD
    exact = sum(max(n, least) for n in tokens)
    counts = range(1, len(tokens) + 1) if count is None else (count,)
    cuts = (_best_cut(tokens, n, least) for n in counts)
    best = next(c for c in cuts if count or padded_tokens(c, least) * than <= exact * more)
    if not rows:
        return best
    multiple = tile // math.gcd(tile, rows)  # of tokens, that have a whole number of tiles of rows
    return tuple(replace(s, length=-(-s.length // multiple) * multiple) for s in best)


def padded_tokens(segments: Sequence[Segment], least: float = 0) -> float:
    """Counts the tokens of all scales of all segments, padding included. least: what a scale counts
    at least."""
    return sum(len(segment.scales) * max(segment.length, least) for segment in segments)


@functools.cache
def _best_cut(tokens: tuple[int, ...], count: int, least: float = 0) -> tuple[Segment, ...]:
    """Cuts scales with so many tokens into `count` segments with the fewest padded tokens. A scale
    counts at least `least`."""
    # The same first scales occur in many cuts: with its cache this is dynamic programming.
    stop = len(tokens)
    if count == 1:
        return (Segment(0, stop, max(tokens)),)
    starts = range(stop - 1, count - 2, -1)  # of the last segment; `min` takes the first of equals
    cuts = (
        (*_best_cut(tokens[:start], count - 1, least), Segment(start, stop, max(tokens[start:])))
        for start in starts
    )
    return min(cuts, key=lambda cut: (padded_tokens(cut, least), padded_tokens(cut)))


# --- chunks ---


def images_at_once(tokens: int, logits_per_token: int) -> int:
    """The number of images that are sampled at once, so that logits and copies of them stay
    within `LOGITS_BYTES`."""
    return max(1, LOGITS_BYTES // (ARRAYS_PER_LOGIT * tokens * logits_per_token * 4))


def map_in_chunks(function: Callable[[slice | Array], Chunk], images: int, at_once: int) -> Chunk:
    """The results of `function(index)` for all images, in order, at most `at_once` in a call.

    function: takes an index of the image axis (int32 [n], or a slice if one call does it) and
      returns arrays with a leading image axis. The last chunk may repeat the last image.
    """
    chunks = -(-images // max(1, at_once))
    if chunks == 1:
        return function(slice(None))
    size = -(-images // chunks)  # equal chunks: the fewest that keep to the limit, none half empty
    # the last chunk repeats the last image instead of leaving a hole: every image is computed alike
    index = jnp.minimum(jnp.arange(chunks * size), images - 1).reshape(chunks, size)
    parts = jax.lax.map(function, index)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:images], parts)
