"""Operands and results of the TPU kernels of token attention; storing a token.

All are pytrees, so a kernel gets the same trees of references, and what nobody asks for is None in
both. Operands are told apart by the names of their fields.

HBM holds slots in tiles, and a single slot of a tile cannot be written. So the tile with the
token's slot is a result that lies in the pool itself (`input_output_aliases`). The kernel reads the
other slots of the tile anyway, puts the token among them, and does so before anything is computed:
scores and sums need not know of it.

Grid steps fetch slots while the tiles of the last ones are written. They never touch the same
slots, because every row and head is fetched once, and its tile is written after that.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.shared.tpu_operands import rounded
from pallas_kernels.token_attention.operands import HeadSlots, NewToken, Query
from pallas_kernels.token_attention.tpu_row import iota

Tree = TypeVar("Tree")


class Prefetched(NamedTuple):
    """int32 [1] each, known before a grid step begins, so that they can choose what it fetches.

    slot: of the token to store. used: slots in use (`HeadSlots.used`). wanted: whether the scores
    of a probe are, 0 or 1.
    """

    slot: Array | None = None
    used: Array | None = None
    wanted: Array | None = None


class Operands(NamedTuple):
    """Operands in memory. token: key and value of the token to store, without its slot."""

    query: Query
    slots: HeadSlots
    token: NewToken | None


class Results(NamedTuple):
    """out: [R, M, H]. mass: new sums. pool: the tile of slots with the token. scores: a probe's."""

    out: Array
    mass: Array | None = None
    pool: Array | None = None
    scores: Array | None = None


def launch(
    kernel: Callable,
    numbers: Prefetched,
    given: Operands,
    results: Results,
    *,
    grid: tuple[int, ...],
    step: tuple[int, int],
    spec: Callable[..., pl.BlockSpec],
    tile: int,
    scratch: Sequence = (),
    cost: pl.CostEstimate,
    interpret,
) -> Results:
    """Run a kernel of token attention.

    Args:
      kernel: gets references like `numbers`, `given` and `results`, then `scratch`, then with a
        token memory for `put_beside`.
      results: arrays like those that are computed; only shapes and types count.
      grid: of rows, which may go to different cores, then of heads, which share blocks of results.
      step: rows and heads of a grid step.
      spec: the part of an operand in a grid step, by its name and its array, or with `result=True`
        of a result.
      tile: slots of a head that are written for the token.
    """

    def specs(arrays: Tree, **of_result) -> Tree:
        def found(path, array):
            if of_result and path[-1].name == "pool":
                # what is known before a grid step comes last
                place = lambda r, n, *rest: (r, n, rest[-1].slot[0] // tile, 0)  # noqa: E731
                return pl.BlockSpec((*step, tile, array.shape[3]), place)
            return spec(path[-1].name, array, **of_result)

        # None has no leaf, so specs are missing where arrays are
        return jax.tree_util.tree_map_with_path(found, arrays)

    heads, width = given.slots.pool.shape[1::2]
    token = [] if given.token is None else [pltpu.VMEM((heads, width), jnp.float32)]
    # a list of one, because Pallas takes a tuple of results apart
    (found,) = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[specs(given)],
            out_specs=[specs(results, result=True)],
            scratch_shapes=[*scratch, *token],
        ),
        out_shape=[jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), results)],
        input_output_aliases=aliases(numbers, given, results),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *["arbitrary"] * (len(grid) - 1))
        ),
        cost_estimate=cost,
        interpret=interpret,
        name="token_attention",
    )(numbers, given)
    return found


def aliases(numbers: Prefetched, given: Operands, results: Results) -> dict[int, int]:
    """Sums, the pool and scores are changed in place: what is not written keeps what it holds."""
    operands, found = (
        # in the order in which Pallas counts operands and results
        [path[-1].name for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        for tree in ((numbers, given), results)
    )
    return {operands.index(n): found.index(n) for n in ("mass", "pool", "scores") if n in found}


def tile_of(pool, fetched: int, interpret) -> int:
    """Slots of the result: the smallest number that the compiler can write at any place.

    fetched: slots of the pool in a grid step.
    """
    slots = pool.shape[2]
    # a whole tile of int8 numbers has 32 lines; of bfloat16, half a tile can be written as well
    tile = min(32 if pool.dtype == jnp.int8 else 8, slots)
    # the interpreter pads operands and results to whole blocks, then takes one for the other
    padded_alike = rounded(slots, tile) == rounded(slots, fetched)
    return tile if padded_alike or interpret is not True else fetched


def put_beside(row, token, rows_ref) -> None:
    """Put keys and values of a row's heads into `rows_ref` [N, 2 H], side by side as the pool holds
    them. float32, because single rows can be addressed in that type only."""
    both = [array[row].astype(jnp.float32) for array in (token.k, token.v)]
    rows_ref[...] = jnp.concatenate(both, axis=-1)


def put(rows_ref, first, slot, pool, tile_ref) -> None:
    """Put the tokens of a row's heads, from head number `first` on, into their slots and into the
    tile that is written.

    Args:
      rows_ref: see `put_beside`.
      slot: number of the slot among those of `pool`.
      pool: reference [heads, C, 2 H] to the slots that the grid step has fetched.
      tile_ref: reference [heads, tile, 2 H] to the result.
    """
    slots, tile = pool.shape[1], tile_ref.shape[1]
    whole = slots // tile * tile

    def in_tile(begin, size: int) -> None:
        here = pl.ds(begin, size)
        # chosen by a mask, because single lines of packed numbers cannot be addressed
        own = iota((size, pool.shape[2]), 0) == slot - begin
        for j in range(pool.shape[0]):
            # float32 holds what the other slots hold exactly (int8: whole numbers)
            new = rows_ref[pl.ds(first + j, 1)]
            new = jnp.where(own, new, pool[j, here].astype(jnp.float32)).astype(pool.dtype)
            tile_ref[j, :size] = new  # goes to memory
            pool[j, here] = new  # is attended to

    # starts of slices are known multiples of the tile, or static
    if whole == slots:
        in_tile(pl.multiple_of(slot // tile * tile, tile), tile)
        return
    pl.when(slot < whole)(lambda: in_tile(pl.multiple_of(slot // tile * tile, tile), tile))
    # the rest of the last tile is no part of the pool
    pl.when(slot >= whole)(lambda: in_tile(whole, slots - whole))
