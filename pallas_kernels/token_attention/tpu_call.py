"""What the TPU kernels of token attention are given, and what they give back.

All are pytrees, so a kernel gets the same trees of references, and what nobody asks for is None in
both. Operands are told apart by the names of their fields.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.token_attention.operands import HeadSlots, NewToken, Query

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
        token memory for `tpu_token.put_beside`.
      results: arrays like those that are computed; only shapes and types count.
      grid: of rows, which may go to different cores, then of heads, which share blocks of results.
      step: rows and heads of a grid step.
      spec: the part of an operand in a grid step, by its name and its array, or with `result=True`
        of a result.
      tile: slots of a head that are written for the token.
    """

    def tile_place(r, n, *rest):
        return r, n, rest[-1].slot[0] // tile, 0  # what is known before a grid step comes last

    def specs(arrays: Tree, **of_result) -> Tree:
        def found(path, array):
            if of_result and path[-1].name == "pool":
                return pl.BlockSpec((*step, tile, array.shape[3]), tile_place)
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
