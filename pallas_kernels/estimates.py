"""Estimates of what one call of an operation computes and moves, whichever kernel runs it.

Compilers cannot look into kernels, so every kernel hands them an estimate. They are told the upper
bound: every token is real, and every slot that a table lists is in use.

FLOPs are those of matrix products, a multiply-add is two. Transcendentals are exponentials. Bytes
are those that memory delivers or takes, not a cache. Tables, angles and vectors are left out: they
are less than 1 %.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.projection import Projection
from pallas_kernels.residual.operands import Sums
from pallas_kernels.tables import BlockTable, BlockWrites
from pallas_kernels.token_attention.operands import HeadSlots, Query

SCALE = 4  # bytes of a scale of an int8 pool
# Compilers take FLOPs to run at the rate of matrix products. TPUs (v5e: 197 to 6.1 TFLOP/s) and
# GPUs (H200: 989 to 33) do about this many of them in the time of one vector operation.
PER_VECTOR_OPERATION = 30


def attend(
    projection: Projection,
    kv_pool: Array,
    table: BlockTable,
    *,
    lse: bool,
    own: bool = True,
    tiles: int = 1,
    scales_at_once: int = 1,
) -> pl.CostEstimate:
    """Cost of attention of every query over every key.

    Args:
      lse: whether the log-sum-exp is written.
      own: whether own keys, if there are any, are read beside those of the table.
      tiles: how often the stored slots are copied from memory: once per tile of queries, or 1 where
        tiles run side by side and find in a cache what the first one copied.
      scales_at_once: the fewest scales of an int8 pool that are copied together.
    """
    rows, heads, tokens, head_dim = projection.shape
    blocks = table.ids.shape[-1]
    queries, pairs = rows * heads * tokens, _pairs(projection, kv_pool, blocks, own)
    parts = (projection.qkv.shape[2] if own else 1) + 1  # the result
    moved = parts * queries * head_dim * projection.dtype.itemsize + 4 * queries * lse
    stored = blocks * _block_bytes(kv_pool, 2, scales_at_once)
    # two products, with two FLOPs per pair and number each
    return _cost(moved + rows * heads * tiles * stored, 4 * pairs * head_dim, pairs)


def attention_moments(
    projection: Projection,
    kv_pool: Array,
    table: BlockTable,
    *,
    squares: bool,
    halves: int = 1,
    scales_at_once: int = 1,
) -> pl.CostEstimate:
    """Cost of sums of attention weights, which are computed a second time.

    halves: 1 where only keys are copied, 2 where the values beside them are copied too. The other
    arguments mean the same as in `attend`.
    """
    rows, heads, tokens, head_dim = projection.shape
    blocks = table.ids.shape[-1]
    queries, pairs = rows * heads * tokens, _pairs(projection, kv_pool, blocks)
    moved = 2 * queries * head_dim * projection.dtype.itemsize + 4 * queries  # q, k, log-sum-exp
    # one float32 sum per key, for squares a second one
    columns = rows * heads * (table.ids.shape[-1] * kv_pool.shape[2] + tokens)
    stored = blocks * _block_bytes(kv_pool, halves, scales_at_once)
    moved += rows * heads * stored + 4 * columns * (1 + squares)
    return _cost(moved, 2 * pairs * head_dim, pairs)


def write(
    projection: Projection,
    kv_pool: Array,
    writes: BlockWrites,
    *,
    blocks: bool = False,
    scales_at_once: int = 1,
) -> pl.CostEstimate:
    """Cost of storing as many tokens as there are slots for.

    blocks: whether every block is read and written as a whole, and every token is read.
    """
    rows, heads, tokens, head_dim = projection.shape
    entries, size = writes.ids.shape[-1], kv_pool.shape[2]
    stored = min(tokens, entries * size)  # no head stores a token twice
    read = 2 * head_dim * projection.dtype.itemsize * (tokens if blocks else stored)
    block = _block_bytes(kv_pool, 2, scales_at_once)
    written = 2 * entries * block if blocks else stored * block / size
    return _cost(rows * heads * (read + written))


def attend_token(query: Query, slots: HeadSlots, stored: int = 0) -> pl.CostEstimate:
    """Cost of attention of one query per row and query head.

    Args:
      query: of a probe one call in `Probe.every` reads the second query and writes its scores,
        float32.
      slots: sums of weights are read and written.
      stored: slots of a head that are written, the token's own among them. Its key and value are
        read.
    """
    q, pool = query.q, slots.pool
    pairs, head_dim, group = pool.size // pool.shape[-1], q.shape[-1], q.shape[1] // pool.shape[1]
    # positions, scales and sums are numbers of 4 bytes
    scales = 0 if slots.scale is None else 2 * pairs
    lines = slots.position.size + scales + 2 * pairs * (slots.mass is not None)
    moved = pool.size * pool.dtype.itemsize + 2 * q.size * q.dtype.itemsize + 4 * lines
    if stored:  # whole tiles are written, for one token
        moved += stored * pool.size // pool.shape[2] * pool.dtype.itemsize
        moved += 2 * q.size // group * q.dtype.itemsize
    flops = 4 * pairs * group * head_dim
    if query.probe is not None:
        moved += 4 * (q.size // group + pairs) / query.probe.every
        flops += 2 * pairs * head_dim / query.probe.every
    return _cost(moved, flops, pairs * group)


def token_product(
    x: Array,
    weights: Array,
    results: Sequence[tuple[int, ...]],
    *,
    streams: int = 0,
    summed: bool = False,
) -> pl.CostEstimate:
    """Cost of a product with weights and of what is done with it (`token_products.api`).

    Args:
      x: the rows that are multiplied.
      results: shapes of results, in the type of the weights.
      streams: residual streams that are read and written, float32.
      summed: whether running sums of the first result are read and written, float32.
    """
    item = weights.dtype.itemsize
    moved = (x.size + weights.size + sum(map(math.prod, results))) * item
    moved += 8 * streams * math.prod(results[0]) + 8 * summed * math.prod(results[0])
    flops = 2 * x.shape[0] * weights.size
    return _cost(moved, flops)


def rank(tie: Array, score: Array | None, part: Array | None) -> pl.CostEstimate:
    """Cost of ranks (`rank.api`): all pairs of a head's slots are compared, and each array is moved
    once. Operations are those of the kernel as compiled for a v5e, which combines comparisons in
    registers of their own."""
    operations = 4 + 5 * (score is not None) + 3 * (part is not None)
    pairs, arrays = tie.size * tie.shape[-1], 3 + (score is not None) + (part is not None)
    return _cost(4 * arrays * tie.size, pairs * operations * PER_VECTOR_OPERATION)


def token_scores(q: Array, pool: Array, pool_scale: Array | None) -> pl.CostEstimate:
    """Cost of scores of a few queries of every head with all of its slots. Values are read too,
    because they lie beside the keys."""
    rows, heads, queries, head_dim = q.shape
    pairs = rows * heads * queries * pool.shape[2]
    scales = 0 if pool_scale is None else pool_scale.size // 2
    moved = pool.size * pool.dtype.itemsize + q.size * q.dtype.itemsize + 4 * (pairs + scales)
    return _cost(moved, 2 * pairs * head_dim)


def sample(logits: Array, noise: Array, top_k: int, top_p: float) -> pl.CostEstimate:
    """Cost of choosing tokens (`sample.api`). Each bit of a threshold takes a pass over the row,
    with three operations per number: compare, select, add. Temperature, guidance, order, noise and
    the largest take eight."""
    likely = 0 < top_p < 1
    searches = (0 < top_k < noise.shape[-1]) + likely
    moved = 4 * (logits.size + noise.size + noise.size // noise.shape[-1])
    flops = noise.size * (searches * 32 * 3 + 8) * PER_VECTOR_OPERATION
    return _cost(moved, flops, noise.size * likely)


def move_slots(pool: Array, places: Array, written: int | None = None) -> pl.CostEstimate:
    """Cost of a pass over a pool in which slots move: it is read, multiplied with matrices [C,
    `places` of a head] that say what goes where, and written. Numbers of four bytes take two
    products. written: slots of a head that are; None: all."""
    products = -(-pool.dtype.itemsize // 2)  # a product moves two bytes of a number
    changed = pool.size // pool.shape[2] * (written or pool.shape[2])
    moved = (pool.size + changed) * pool.dtype.itemsize + places.size * places.dtype.itemsize
    flops = 2 * products * changed * places.shape[-1]
    return _cost(moved, flops)


def move_some(pools: Sequence[Array], count: int) -> pl.CostEstimate:
    """Cost of moving the last `count` slots of every head, one by one: each is read and written, as
    if all of them moved, and its target is read."""
    (rows, heads, _, width), size = pools[0].shape, pools[0].dtype.itemsize
    moved = len(pools) * rows * heads * count * (2 * width * size + 4)
    return _cost(moved)


def finish(
    projection: Projection,
    parts: int,
    turned: int = 0,
    stored: tuple[Array, BlockWrites] | None = None,
    written: bool = True,
) -> pl.CostEstimate:
    """Cost of finishing queries, keys or values once for all programs that read them.

    Args:
      parts: how many of the three are finished.
      turned: columns of the products that rotate, summed over these parts.
      stored: the pool, and which keys and values are stored in it on the way.
      written: whether they are written for other programs as well.
    """
    rows, heads, tokens, head_dim = projection.shape
    numbers = rows * heads * tokens * head_dim
    moved = (1 + written) * parts * numbers * projection.dtype.itemsize
    if stored is not None:
        pool, writes = stored
        count = min(tokens, writes.ids.shape[-1] * pool.shape[2])
        moved += 2 * rows * heads * count * head_dim * pool.dtype.itemsize
    return _cost(moved, 2 * numbers * turned)


def add_and_normalize(stream: Array, sums: Sums | None, result) -> pl.CostEstimate:
    """Cost of adding a branch to a residual stream and normalising it.

    Args:
      sums: of the branch; None: nothing is added.
      result: type of the normalised rows.
    """
    moved = stream.size * (stream.dtype.itemsize + jnp.dtype(result).itemsize)
    if sums is not None:
        moved += sums.array.size * (sums.array.dtype.itemsize + stream.dtype.itemsize)
    return _cost(moved)


def to_8_bits(sums: Sums, activation: bool) -> pl.CostEstimate:
    """Cost of bringing the rows of a product into 8 bits. activation: whether there is one, with an
    exponential for every number."""
    size, kind = sums.array.size, sums.array.dtype
    moved = size * (kind.itemsize + 1)
    return _cost(moved, transcendentals=size * activation)


def _cost(moved: float, flops: float = 0, transcendentals: int = 0) -> pl.CostEstimate:
    """moved: bytes."""
    return pl.CostEstimate(
        flops=round(flops), transcendentals=transcendentals, bytes_accessed=round(moved)
    )


def _pairs(projection: Projection, kv_pool: Array, blocks: int, own: bool = True) -> int:
    """Pairs of a query and a key. blocks: those that a head reads."""
    rows, heads, tokens, _ = projection.shape
    own = tokens if own and projection.qkv.shape[2] > 1 else 0  # queries alone see stored keys only
    return rows * heads * tokens * (own + blocks * kv_pool.shape[2])


def _block_bytes(kv_pool: Array, halves: int, scales_at_once: int) -> int:
    """Bytes of a block with its scales: its keys alone (halves=1), or keys and values (2)."""
    _, _, size, width = kv_pool.shape
    scales = max(scales_at_once, halves * size) if kv_pool.dtype == jnp.int8 else 0
    return size * width * halves // 2 * kv_pool.dtype.itemsize + SCALE * scales
