"""Token attention on TPU where only the first slots of a head are in use, as in full caches, which
are half empty on average. Slots are cut into pieces; pieces without a slot in use are not fetched.

A grid step serves a piece of all heads of a row, or of some of them. Pallas fetches a piece while
the last one is in use, and nothing where the next one is the same. So grid steps behind the last
piece in use ask for that one again and do nothing. Maximum, total and sums of a row stay in vector
memory from piece to piece.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.shared.tpu_operands import LANES
from pallas_kernels.token_attention import tpu_call, tpu_row
from pallas_kernels.token_attention.tpu_call import Operands, Prefetched, Results

PIECE_BYTES = 3 * 2**19  # of the pool, about: two pieces leave room in 16 MiB of vector memory
LOWEST = -1e30  # the maximum of nothing: finite, so that differences are finite as well


def slots_of_piece(pool, heads: int) -> int:
    """Slots that are fetched at once: a multiple of the lanes, because positions lie along them."""
    slot = heads * pool.shape[-1] * pool.dtype.itemsize
    return max(1, PIECE_BYTES // (slot * LANES)) * LANES


class Running(NamedTuple):
    """The softmax of a row's query heads so far. top: largest score [G N, 1]. total: sum of weights
    [G N, 1], sums: weighted values [G N, W], both relative to `top`."""

    top: Array
    total: Array
    sums: Array


def attend(
    launch: Callable, numbers: Prefetched, given: Operands, results: Results, heads: int, piece: int
) -> Results:
    """Piece after piece of the slots in use, `heads` and `piece` slots of them in a grid step, by
    `tpu_call.launch`."""
    pool, size = given.slots.pool, given.query.q.shape[-1]
    rows, every, slots, width = pool.shape
    group, queries = given.slots.group_size(given.query.q), given.query.q.shape[1]
    line, sums = (queries, 1), (queries, tpu_row.columns(size, width))
    # kept from grid step to grid step, unlike blocks of operands and results
    running = Running(*(pltpu.VMEM(shape, jnp.float32) for shape in (line, line, sums)))
    return launch(
        partial(_attend_piece, heads, group, slots),
        numbers,
        given,
        results,
        # pieces of a row follow each other: they share the running softmax
        grid=(rows, every // heads, pl.cdiv(slots, piece)),
        step=(1, heads),
        spec=partial(_spec, heads=heads, piece=piece),
        scratch=[running],
    )


def _spec(name: str, array, result: bool = False, *, heads: int, piece: int) -> pl.BlockSpec:
    """The part of an operand or result in a grid step."""
    if result:
        return pl.BlockSpec((1, *array.shape[1:]), lambda r, *_: (r, 0, 0))
    if name == "first_bias":  # read number by number
        return pl.BlockSpec(memory_space=pltpu.SMEM)

    def index(r, n, part, numbers):
        # the last piece in use again: nothing is fetched
        part = jnp.minimum(part, (numbers.used[0] - 1) // piece)
        row = 0 if len(array) == 1 else r  # rows may share their positions
        places = {"pool": (r, n, part, 0), "position": (row, 0, part), "scale": (r, 0, 0, part)}
        return places.get(name, (r, 0, 0))

    shapes = {
        "pool": (1, heads, piece, array.shape[-1]),
        "position": (1, array.shape[1], piece),
        "scale": (1, *array.shape[1:3], piece),
    }
    return pl.BlockSpec(shapes.get(name, (1, *array.shape[1:])), index)


def _attend_piece(
    some: int, group: int, slots: int, numbers, given, results, running, rows_ref=None
):
    # the interpreter knows program numbers here, but not inside of what `when` runs
    row, first, part = pl.program_id(0), pl.program_id(1) * some, pl.program_id(2)

    # pieces are the innermost axis of the grid: a row's first one begins anew
    @pl.when(part == 0)
    def _():
        running.top[...] = jnp.full_like(running.top, LOWEST)
        running.total[...] = jnp.zeros_like(running.total)
        running.sums[...] = jnp.zeros_like(running.sums)

    pool = given.slots.pool.at[0]
    piece = pool.shape[1]
    if given.token is not None:
        slot = numbers.slot[0]

        # the piece with the token's slot is in use, so it is fetched
        @pl.when(part == slot // piece)
        def _():
            tpu_call.put_beside(0, given.token, rows_ref)
            tpu_call.put(rows_ref, first, slot - part * piece, pool, results.pool.at[0])

    # behind the last piece in use nothing new was fetched: the same piece is there once more
    @pl.when(part * piece < numbers.used[0])
    def _():
        lines = tpu_row.Lines.of(given.query.q.shape[1], group)
        mine = [lines.head(first + j) for j in range(some)]
        _add_piece(row, part, lines, mine, slots, given, running)

    @pl.when(part == pl.num_programs(2) - 1)
    def _():
        out_ref = results.out
        # lines of other heads are written by the grid steps that serve these
        mine = tpu_row.Lines.of(out_ref.shape[1], group).between(first, first + some)
        found = (running.sums[...] / running.total[...])[:, -out_ref.shape[2] :]
        out_ref[0] = jnp.where(mine, found.astype(out_ref.dtype), out_ref[0])


def _add_piece(
    row, part, lines: tpu_row.Lines, mine: list, slots: int, given: Operands, running: Running
) -> None:
    """Add a piece of the heads that are here to the running softmax. mine: see `tpu_row.scores`."""
    query, held = given.query, given.slots
    size, width = held.pool.shape[2:]
    queries = tpu_row.padded(query.q[0], width)
    scores = tpu_row.scores(queries, mine, held.pool.at[0])
    if held.scale is not None:
        scores *= lines.spread(held.scale[0, 0])
    slot = tpu_row.iota(scores.shape, 1) + part * size
    if query.first_bias is not None:
        scores += jnp.where(slot == 0, query.first_bias[row], 0.0)
    # what lies beyond the end of the array may be anything
    visible = (lines.spread(held.position[0]) >= 0) & (slot < slots)
    # a piece without a visible slot leaves the maximum at LOWEST or above: no -inf minus -inf
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.maximum(running.top[...], scores.max(axis=1, keepdims=True))
    weights, rescale = jnp.exp(scores - top), jnp.exp(running.top[...] - top)
    running.total[...] = running.total[...] * rescale + weights.sum(axis=1, keepdims=True)
    if held.scale is not None:
        weights = jnp.where(visible, weights * lines.spread(held.scale[0, 1]), 0.0)
    width = running.sums.shape[1]
    found = tpu_row.mean(weights, mine, held.pool.at[0], queries.dtype, width)
    running.sums[...] = running.sums[...] * rescale + found
    running.top[...] = top
