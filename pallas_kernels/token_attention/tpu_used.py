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

from pallas_kernels import estimates
from pallas_kernels.token_attention import tpu_row
from pallas_kernels.tpu_operands import LANES, pools

PIECE_BYTES = 3 * 2**19  # of the pool, about
LOWEST = -1e30  # the maximum of nothing: finite, so that differences are


def slots_of_piece(pool, heads: int) -> int:
    """A multiple of the lanes, by which positions are cut."""
    slot = heads * pool.shape[-1] * pool.dtype.itemsize
    return max(1, PIECE_BYTES // (slot * LANES)) * LANES


def attend(q, pool, position, used, bias, scale, *, heads: int, piece: int, interpret):
    """The output in the layout of `q`, which has zeros where values are if they lie beside keys.

    used: int32 [1]. heads: of a grid step. piece: slots of one.
    """
    rows, every, slots, width = pool.shape
    values = width // 2 if q.shape[-1] < width else width  # columns of the sums
    given = {"q": q, "position": position, "bias": bias, "scale": scale}
    given["pool"] = pools(pool, None, interpret)[0]
    given = {name: array for name, array in given.items() if array is not None}

    def spec(name, array) -> pl.BlockSpec:
        if name == "bias":
            return pl.BlockSpec(memory_space=pltpu.SMEM)

        def index(r, n, part, used):
            # the last piece in use again: nothing is fetched
            part = jnp.minimum(part, (used[0] - 1) // piece)
            row = 0 if len(array) == 1 else r
            places = {"pool": (r, n, part, 0), "q": (r, 0, 0), "position": (row, 0, part)}
            return places.get(name, (r, 0, 0, part))

        shapes = {
            "pool": (1, heads, piece, width),
            "q": (1, *array.shape[1:]),
            "position": (1, array.shape[1], piece),
            "scale": (1, *array.shape[1:3], piece),
        }
        return pl.BlockSpec(shapes[name], index)

    out = jax.ShapeDtypeStruct((rows, every, values), q.dtype)
    return pl.pallas_call(
        partial(_attend_piece, heads, slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, every // heads, pl.cdiv(slots, piece)),
            in_specs=[{name: spec(name, array) for name, array in given.items()}],
            out_specs=pl.BlockSpec((1, every, values), lambda r, n, part, used: (r, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((every, 1), jnp.float32),
                pltpu.VMEM((every, 1), jnp.float32),
                pltpu.VMEM((every, values), jnp.float32),
            ],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=estimates.attend_token(q, pool, position, scale, None, step=piece),
        interpret=interpret,
        name="token_attention",
    )(used, given)


def _attend_piece(some: int, slots: int, used, given, out_ref, top_ref, total_ref, sum_ref):
    # here and not in what `when` runs, where the interpreter does not know them
    row, first, part = pl.program_id(0), pl.program_id(1) * some, pl.program_id(2)

    @pl.when(part == 0)
    def _():
        top_ref[...] = jnp.full_like(top_ref, LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(part * given["pool"].shape[2] < used[0])
    def _():
        _add_piece(row, first, part, some, slots, given, top_ref, total_ref, sum_ref)

    @pl.when(part == pl.num_programs(2) - 1)
    def _():
        number = tpu_row.iota((out_ref.shape[1], 1), 0)
        mine = (number >= first) & (number < first + some)
        found = (sum_ref[...] / total_ref[...]).astype(out_ref.dtype)
        out_ref[0] = jnp.where(mine, found, out_ref[0])


def _add_piece(row, first, part, some, slots: int, given, top_ref, total_ref, sum_ref) -> None:
    queries, size = given["q"][0], given["pool"].shape[2]
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
    width = sum_ref.shape[1]
    found = tpu_row.mean(weights, mine, given["pool"].at[0], queries.dtype, width)
    sum_ref[...] = sum_ref[...] * rescale + found
    top_ref[...] = top
