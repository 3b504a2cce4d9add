"""Token attention on TPU where only the first slots of a head are in use: they are cut into pieces,
of which those that are not used are not fetched. For full caches, half empty on average.

A grid step serves a piece of all heads of a row, or of some of them. Pallas fetches a piece while
the last one is in use, and nothing where the next one is the same: behind the last piece in use,
grid steps ask for that one again and do nothing. Maximum, total and sums of a row stay in vector
memory from piece to piece.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.token_attention import tpu_row, tpu_token
from pallas_kernels.tpu_operands import LANES

PIECE_BYTES = 3 * 2**19  # of the pool, about
LOWEST = -1e30  # the maximum of nothing: finite, so that differences are


def slots_of_piece(pool, heads: int) -> int:
    """A multiple of the lanes, by which positions are cut."""
    slot = heads * pool.shape[-1] * pool.dtype.itemsize
    return max(1, PIECE_BYTES // (slot * LANES)) * LANES


def attend(given: dict, numbers: dict, *, heads: int, piece: int, tile: int, estimate, interpret):
    """The output and the pool.

    Args:
      given: operands by name; "k" and "v" if their token is to be stored.
      numbers: int32 [1] each: "used", and the "slot" of the token.
      heads: of a grid step. piece: slots of one. tile: slots that are written.
    """
    rows, every, slots, width = given["pool"].shape
    values = tpu_row.columns(given["q"].shape[-1], width)
    results, stores = {"out": given["q"]}, "slot" in numbers
    results |= {"pool": given["pool"]} if stores else {}
    out_specs = {"out": pl.BlockSpec((1, *given["q"].shape[1:]), lambda r, *_: (r, 0, 0))}
    out_specs |= {"pool": tpu_token.tile_spec(given["pool"], 1, heads, tile)} if stores else {}
    found = pl.pallas_call(
        partial(_attend_piece, heads, slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, every // heads, pl.cdiv(slots, piece)),
            in_specs=[{name: _spec(name, a, heads, piece) for name, a in given.items()}],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((every, 1), jnp.float32),
                pltpu.VMEM((every, 1), jnp.float32),
                pltpu.VMEM((every, values), jnp.float32),
                *([tpu_token.scratch(given["pool"])] if stores else []),
            ],
        ),
        out_shape={n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in results.items()},
        input_output_aliases=tpu_token.aliases(numbers, given, results),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=estimate,
        interpret=interpret,
        name="token_attention",
    )(numbers, given)
    return found["out"], found.get("pool", given["pool"])


def _spec(name: str, array, heads: int, piece: int) -> pl.BlockSpec:
    """The part of an operand in a grid step."""
    if name == "bias":
        return pl.BlockSpec(memory_space=pltpu.SMEM)

    def index(r, n, part, numbers):
        # the last piece in use again: nothing is fetched
        part = jnp.minimum(part, (numbers["used"][0] - 1) // piece)
        row = 0 if len(array) == 1 else r
        places = {"pool": (r, n, part, 0), "position": (row, 0, part), "scale": (r, 0, 0, part)}
        return places.get(name, (r, 0, 0))

    shapes = {
        "pool": (1, heads, piece, array.shape[-1]),
        "position": (1, array.shape[1], piece),
        "scale": (1, *array.shape[1:3], piece),
    }
    return pl.BlockSpec(shapes.get(name, (1, *array.shape[1:])), index)


def _attend_piece(some: int, slots: int, numbers, given, results, *memory):
    *sums, rows_ref = memory if "slot" in numbers else (*memory, None)
    top_ref, total_ref, sum_ref = sums
    # here and not in what `when` runs, where the interpreter does not know them
    row, first, part = pl.program_id(0), pl.program_id(1) * some, pl.program_id(2)

    @pl.when(part == 0)
    def _():
        top_ref[...] = jnp.full_like(top_ref, LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    piece = given["pool"].shape[2]
    if "slot" in numbers:
        slot = numbers["slot"][0]

        @pl.when(part == slot // piece)
        def _():
            tpu_token.put_beside(0, given, rows_ref)
            here = given["pool"].at[0], results["pool"].at[0]
            tpu_token.put(rows_ref, first, slot - part * piece, *here)

    @pl.when(part * piece < numbers["used"][0])
    def _():
        _add_piece(row, first, part, some, slots, given, top_ref, total_ref, sum_ref)

    @pl.when(part == pl.num_programs(2) - 1)
    def _():
        out_ref = results["out"]
        number = tpu_row.iota((out_ref.shape[1], 1), 0)
        mine = (number >= first) & (number < first + some)
        found = (sum_ref[...] / total_ref[...])[:, -out_ref.shape[2] :].astype(out_ref.dtype)
        out_ref[0] = jnp.where(mine, found, out_ref[0])


def _add_piece(row, first, part, some, slots: int, given, top_ref, total_ref, sum_ref) -> None:
    size, width = given["pool"].shape[2:]
    queries = tpu_row.padded(given["q"][0], width)
    number = tpu_row.iota((len(queries), 1), 0)
    mine = [number == first + j for j in range(some)]
    scores = tpu_row.scores(queries, mine, given["pool"].at[0])
    if "scale" in given:
        scores *= given["scale"][0, 0]
    slot = tpu_row.iota(scores.shape, 1) + part * size
    if "bias" in given:
        scores += jnp.where(slot == 0, given["bias"][row], 0.0)
    # what lies beyond the end of the array may be anything
    visible = (given["position"][0] >= 0) & (slot < slots)
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.maximum(top_ref[...], scores.max(axis=1, keepdims=True))
    weights, rescale = jnp.exp(scores - top), jnp.exp(top_ref[...] - top)
    total_ref[...] = total_ref[...] * rescale + weights.sum(axis=1, keepdims=True)
    if "scale" in given:
        weights = jnp.where(visible, weights * given["scale"][0, 1], 0.0)
    operands = weights, mine, given["pool"].at[0], queries.dtype
    found = tpu_row.mean(*operands, sum_ref.shape[1])
    sum_ref[...] = sum_ref[...] * rescale + found
    top_ref[...] = top
