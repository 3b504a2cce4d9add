"""What one call of an operation computes and moves, whichever kernel runs it: for compilers, which
cannot look into kernels, and for the model of compiled programs.

Upper bounds: all T tokens are real and every slot of a table is owned, unless `owning` says how
many are: heads that hold little have tables as long as those that hold much. FLOPs are those of
matrix products, a multiply-add is two; transcendentals are exponentials. Bytes are those that
memory delivers or takes, not a cache; tables, angles and vectors are left out, less than 1 %.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

SCALE = 4  # bytes of a scale of an int8 pool
# FLOPs of an estimate are taken to run at the rate of matrix products, of which TPUs (v5e: 197 to
# 6.1 TFLOP/s) and GPUs (H200: 989 to 33) do about so many in the time of a vector operation
PER_VECTOR_OPERATION = 30
Shares = Mapping[tuple[int, int], float]
_owned: ContextVar[Shares | None] = ContextVar("owned", default=None)
_written: ContextVar[Mapping[tuple[int, int], tuple[float, float]] | None]
_written = ContextVar("written", default=None)
_used: ContextVar[Sequence[int] | None] = ContextVar("used", default=None)


@contextlib.contextmanager
def owning(
    shares: Shares,
    written: Mapping[tuple[int, int], tuple[float, float]] | None = None,
    used: Sequence[int] | None = None,
) -> Iterator[None]:
    """Calls that are traced meanwhile are estimated with the share of their tables' slots that
    heads own on average: {(queries, entries of a head's table): share}, 1 for all others. written:
    likewise of tables that say what is stored, the shares of their entries and of their slots that
    are used. used: of token attention that is told how many slots are in use, all these numbers."""
    tokens = _owned.set(shares), _written.set(written), _used.set(used)
    try:
        yield
    finally:
        _owned.reset(tokens[0])
        _written.reset(tokens[1])
        _used.reset(tokens[2])


def attend(
    projection, kv_pool, table, *, lse: bool, tiles: int = 1, scales_at_once: int = 1
) -> pl.CostEstimate:
    """Of attention, every query with every key.

    Args:
      lse: whether the log-sum-exp is written.
      tiles: of queries that copy stored slots from memory once more; 1 where they run side by side
        and a cache has what the first one copied.
      scales_at_once: the fewest scales of an int8 pool that are copied together.
    """
    rows, heads, tokens, head_dim = projection.shape
    queries, pairs = rows * heads * tokens, _pairs(projection, kv_pool, table)
    parts = projection.qkv.shape[2] + 1  # the result
    moved = parts * queries * head_dim * projection.dtype.itemsize + 4 * queries * lse
    stored = _blocks(projection, table) * _block_bytes(kv_pool, 2, scales_at_once)
    return pl.CostEstimate(
        flops=round(4 * pairs * head_dim),
        transcendentals=round(pairs),
        bytes_accessed=round(moved + rows * heads * tiles * stored),
    )


def attention_moments(
    projection, kv_pool, table, *, squares: bool, halves: int = 1, scales_at_once: int = 1
) -> pl.CostEstimate:
    """Of sums of weights, which are computed again.

    halves: 1: keys are copied, 2: the values beside them as well. The rest as in `attend`.
    """
    rows, heads, tokens, head_dim = projection.shape
    queries, pairs = rows * heads * tokens, _pairs(projection, kv_pool, table)
    moved = 2 * queries * head_dim * projection.dtype.itemsize + 4 * queries  # q, k, log-sum-exp
    columns = rows * heads * (_slots(kv_pool, table) + tokens)
    stored = _blocks(projection, table) * _block_bytes(kv_pool, halves, scales_at_once)
    return pl.CostEstimate(
        flops=round(2 * pairs * head_dim),
        transcendentals=round(pairs),
        bytes_accessed=round(moved + rows * heads * stored + 4 * columns * (1 + squares)),
    )


def write(
    projection, kv_pool, writes, *, blocks: bool = False, scales_at_once: int = 1
) -> pl.CostEstimate:
    """Of storing as many tokens as there are slots for.

    blocks: every block is read and written as a whole, and every token is read.
    """
    rows, heads, tokens, head_dim = projection.shape
    entries, size = writes.ids.shape[-1], kv_pool.shape[2]
    used, filled = (_written.get() or {}).get((tokens, entries), (1, 1))
    stored = min(tokens, entries * size * filled)
    read = 2 * head_dim * projection.dtype.itemsize * (tokens if blocks else stored)
    block = _block_bytes(kv_pool, 2, scales_at_once)
    written = 2 * entries * used * block if blocks else stored * block / size
    moved = round(rows * heads * (read + written))
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)


def attend_token(
    q, pool, position, pool_scale, mass, *, step: int | None = None, stored: int = 0
) -> pl.CostEstimate:
    """Of attention of one query per row and head over all slots; step: over those in use, so many
    at once. float32: positions take as many bytes, scales twice, sums are read and written. stored:
    slots of a head that are written for the token's, whose key and value are read."""
    used = _share(pool.shape[2], step) if step else 1.0
    pairs, head_dim = pool.size // pool.shape[-1], q.shape[-1]
    scales = 0 if pool_scale is None else 2 * pairs
    lines = used * (position.size + scales) + 2 * pairs * (mass is not None)
    moved = used * pool.size * pool.dtype.itemsize + 2 * q.size * q.dtype.itemsize + 4 * lines
    if stored:
        moved += stored * pool.size // pool.shape[2] * pool.dtype.itemsize
        moved += 2 * q.size * q.dtype.itemsize
    pairs *= used
    return pl.CostEstimate(
        flops=round(4 * pairs * head_dim),
        transcendentals=round(pairs),
        bytes_accessed=round(moved),
    )


def rank(tie, score, part) -> pl.CostEstimate:
    """See `rank.api`: all pairs of a head's slots, and each array once. Operations are those of the
    kernel as it is compiled for a v5e, which combines comparisons in registers of their own."""
    operations = 4 + 5 * (score is not None) + 3 * (part is not None)
    pairs, arrays = tie.size * tie.shape[-1], 3 + (score is not None) + (part is not None)
    return pl.CostEstimate(
        flops=pairs * operations * PER_VECTOR_OPERATION,
        transcendentals=0,
        bytes_accessed=4 * arrays * tie.size,
    )


def token_scores(q, pool, pool_scale) -> pl.CostEstimate:
    """Of scores of a few queries of every head with all of its slots, values read along."""
    rows, heads, queries, head_dim = q.shape
    pairs = rows * heads * queries * pool.shape[2]
    scales = 0 if pool_scale is None else pool_scale.size // 2
    moved = pool.size * pool.dtype.itemsize + q.size * q.dtype.itemsize + 4 * (pairs + scales)
    return pl.CostEstimate(flops=2 * pairs * head_dim, transcendentals=0, bytes_accessed=moved)


def move_slots(pool, places) -> pl.CostEstimate:
    """Of a pass over a pool in which slots move: read, multiplied with matrices that say what goes
    where [C, `places` of a head], written. Numbers of four bytes take two products."""
    products = -(-pool.dtype.itemsize // 2)
    moved = 2 * pool.size * pool.dtype.itemsize + places.size * places.dtype.itemsize
    flops = 2 * products * pool.size * places.shape[-1]
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved)


def _share(slots: int, step: int) -> float:
    """Of a head's slots that are read in steps of so many, on average."""
    used = np.asarray([slots] if _used.get() is None else _used.get())
    return float(np.minimum(-(-used // step) * step, slots).mean()) / slots


def finish(projection, parts: int, turned: int = 0) -> pl.CostEstimate:
    """Of finishing so many parts of a projection, once for all who read them. turned: columns of
    the products that rotate, of all these parts together."""
    rows, heads, tokens, head_dim = projection.shape
    numbers = rows * heads * tokens * head_dim
    return pl.CostEstimate(
        flops=2 * numbers * turned,
        transcendentals=0,
        bytes_accessed=2 * parts * numbers * projection.dtype.itemsize,
    )


def _slots(kv_pool, table) -> int:
    """Of a head's table."""
    return table.ids.shape[-1] * kv_pool.shape[2]


def _pairs(projection, kv_pool, table) -> float:
    """Of queries and keys."""
    rows, heads, tokens, _ = projection.shape
    own = tokens if projection.qkv.shape[2] > 1 else 0
    return rows * heads * tokens * (own + _blocks(projection, table) * kv_pool.shape[2])


def _blocks(projection, table) -> float:
    """That a head reads on average."""
    entries = table.ids.shape[-1]
    return entries * (_owned.get() or {}).get((projection.shape[2], entries), 1)


def _block_bytes(kv_pool, halves: int, scales_at_once: int) -> int:
    """Of a block, keys alone (halves=1) or with values, and of its scales."""
    _, _, size, width = kv_pool.shape
    scales = max(scales_at_once, halves * size) if kv_pool.dtype == jnp.int8 else 0
    return size * width * halves // 2 * kv_pool.dtype.itemsize + SCALE * scales
