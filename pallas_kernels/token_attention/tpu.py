"""Token attention on TPU (Mosaic). See `api.attend`.

Tiling. A grid step serves all heads of some rows, or some heads of one row (`tpu_slots.steps`),
whose part of the pool Pallas fetches in one piece while the last step's is in use. Scores of a row
are one matrix [N, C], heads by slots, as positions and sums are stored; so the softmax of all heads
is one.

A head's slots are a factor of the matrix unit whatever it is multiplied with, so all queries of the
row are, and the head's own row of the product is kept: the unit is free, as the time that memory
takes for 128 slots of 64 columns in bfloat16 is 60 cycles of a v5e, that of the unit 16. Keys and
values lie side by side in a slot and are not taken apart where a half is no whole number of lanes:
queries have zeros where values are, and of the weighted sums the last half is kept.

What lies in slots that are not visible is multiplied with weights of 0, which is nothing unless it
is NaN or infinite: a row whose result is not finite is computed again from numbers that are. The
token that is served may be stored on the way (`tpu_token`).

Traffic, with b bytes per element: R N C 2 H b for the pool, read once (2 H padded to 128, C to a
tile of 8, 16 or 32), R N 8 2 H b to store a token (int8: 32), and per slot 4 bytes for positions,
8 for sums, 8 for an int8 pool's scales.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import estimates, tpu_slots
from pallas_kernels.cache_write.reference import quantize
from pallas_kernels.token_attention import storing, tpu_row, tpu_token, tpu_used
from pallas_kernels.token_attention.sight import Sight
from pallas_kernels.tpu_operands import pools

MOST_BYTES = 2**22  # of the pool in a grid step; there twice, in 16 MiB of vector memory


def attend(
    q,
    pool,
    position,
    sight,
    first_bias,
    pool_scale,
    mass,
    mass_weight,
    *,
    interpret,
    most_bytes: int = MOST_BYTES,
    piece: int | None = None,
):
    """See `api.attend`. most_bytes: of the pool in a grid step. piece: slots of one where only the
    first slots are in use; None takes those of `tpu_used.slots_of_piece`."""
    tiles = tpu_slots.steps(pool, "token attention takes", most_bytes), piece
    given = q, None, pool, position, sight, first_bias, pool_scale, mass, mass_weight
    return _run(*given, tiles, interpret)[:2]


def store_and_attend(
    q,
    k,
    v,
    slot,
    pool,
    position,
    sight,
    first_bias,
    pool_scale,
    mass,
    mass_weight,
    *,
    interpret,
    most_bytes: int = MOST_BYTES,
    piece: int | None = None,
):
    """See `api.store_and_attend`, and `attend`. For an int8 pool XLA makes whole numbers, and
    stores their scales."""
    tiles = tpu_slots.steps(pool, "token attention takes", most_bytes), piece
    if pool_scale is not None:
        (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
        scale = jnp.stack([k_scale, v_scale], axis=-1)[:, :, None]
        pool_scale = storing.store_scales(scale, slot, pool_scale)
    token = k, v, jnp.asarray(slot, jnp.int32).reshape(1)
    given = q, token, pool, position, sight, first_bias, pool_scale, mass, mass_weight
    return *_run(*given, tiles, interpret), pool_scale


def _run(q, token, pool, position, sight, bias, scale, mass, weight, tiles, interpret):
    """Output, sums, and the pool with the token, or as it was where that is None. tiles: rows and
    heads of a grid step, and the slots of a piece."""
    (together, some), piece = tiles
    rows, heads, slots, _ = pool.shape
    given = {"q": q, "bias": bias, "position": position, "scale": scale}
    given |= {"pool": pools(pool, None, interpret)[0]}
    numbers = {}
    if token is not None:
        given["k"], given["v"], numbers["slot"] = token
    piece = piece or tpu_used.slots_of_piece(pool, some)
    cut = sight.used is not None and mass is None and sight.newest is None and piece < slots
    tile = tpu_token.tile_of(pool, piece if cut else slots, interpret)
    stored = 0 if token is None else tile
    estimate = partial(estimates.attend_token, q, pool, position, scale, mass, stored=stored)
    if cut:
        numbers |= {"used": jnp.asarray(sight.used, jnp.int32).reshape(1)}
        sizes = {"heads": some, "piece": piece, "tile": tile, "estimate": estimate(step=piece)}
        out, pool = tpu_used.attend(_present(given), numbers, **sizes, interpret=interpret)
        return out, None, pool
    given |= {
        "newest": None if sight.newest is None else jnp.asarray(sight.newest).reshape(1),
        "reach": sight.reach,
        "weight": None if mass is None else jnp.asarray(weight, jnp.float32).reshape(1),
        "mass": mass,
    }
    given = _present(given)
    results = _present({"out": q, "mass": mass, "pool": None if token is None else pool})
    found = pl.pallas_call(
        partial(_attend_rows, sight.protected, some),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows // together, heads // some),
            in_specs=[{name: _spec(name, array, together, some) for name, array in given.items()}],
            out_specs={n: _result_spec(n, a, together, some, tile) for n, a in results.items()},
            scratch_shapes=[] if token is None else [tpu_token.scratch(pool)],
        ),
        out_shape={n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in results.items()},
        input_output_aliases=tpu_token.aliases(numbers, given, results),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=estimate(),
        interpret=interpret,
        name="token_attention",
    )(numbers, given)
    return found["out"], found.get("mass"), found.get("pool", pool)


def _spec(name: str, array, rows: int, heads: int) -> pl.BlockSpec:
    """The part of an operand or result in grid step (r, n): numbers in scalar memory, the pool's
    rows and heads, of anything else the rows with all heads, or all there is."""
    if name in ("newest", "reach", "bias", "weight"):
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    if name == "pool":
        return pl.BlockSpec((rows, heads, *array.shape[2:]), lambda r, n, *_: (r, n, 0, 0))
    shared, rest = len(array) == 1, array.shape[1:]
    return pl.BlockSpec(
        (1 if shared else rows, *rest), lambda r, n, *_: (0 if shared else r, *[0] * len(rest))
    )


def _present(arrays: dict) -> dict:
    return {name: array for name, array in arrays.items() if array is not None}


def _result_spec(name: str, array, rows: int, heads: int, tile: int) -> pl.BlockSpec:
    if name == "pool":
        return tpu_token.tile_spec(array, rows, heads, tile)
    return _spec(name, array, rows, heads)


def _attend_rows(protected: int, some: int, numbers, given, results, rows_ref=None):
    # here and not in the loop, where the interpreter does not know them
    begin, first = pl.program_id(0) * len(given["pool"]), pl.program_id(1) * some

    def row(i, _):
        if "slot" in numbers:
            tpu_token.put_beside(i, given, rows_ref)
            here = given["pool"].at[i], results["pool"].at[i]
            tpu_token.put(rows_ref, first, numbers["slot"][0], *here)
        _attend_row(i, begin + i, first, protected, some, given, results)
        return 0

    jax.lax.fori_loop(0, len(given["pool"]), row, 0)


def _attend_row(i, row, first, protected: int, some: int, given, results) -> None:
    """Row i of the grid step, number `row` of all; of its heads those from number `first` on."""
    queries = tpu_row.padded(given["q"][i], given["pool"].shape[-1])
    (heads, _), slots = queries.shape, given["pool"].shape[2]
    shape = heads, slots
    number = tpu_row.iota((heads, 1), 0)
    mine = [number == first + j for j in range(some)]
    scores = tpu_row.scores(queries, mine, given["pool"].at[i])
    if "scale" in given:
        scores *= given["scale"][i, 0]
    if "bias" in given:
        scores += jnp.where(tpu_row.iota(shape, 1) == 0, given["bias"][row], 0.0)
    visible = jnp.broadcast_to(_visible(i, row, protected, heads, given), shape)
    scores = jnp.where(visible, scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    seen = weights
    if "scale" in given:
        seen = jnp.where(visible, weights * given["scale"][i, 1], 0.0)
    size = results["out"].shape[-1]
    width = tpu_row.columns(size, given["pool"].shape[-1])
    out = tpu_row.mean(seen, mine, given["pool"].at[i], queries.dtype, width)
    whole = some == heads
    here = None if whole else (number >= first) & (number < first + some)

    def put(ref, new) -> None:
        ref[i] = new if whole else jnp.where(here, new, ref[i])

    put(results["out"], out[:, -size:].astype(queries.dtype))
    if "mass" in results:
        put(results["mass"], given["mass"][i] + given["weight"][0] * weights)


def _visible(i, row, protected: int, heads: int, given):
    """[N, C], or [1, C] where heads see the same."""
    positions = given["position"]
    position = positions[i if len(positions) > 1 else 0]
    if "newest" not in given:
        return Sight().sees(position)
    newest, sight = given["newest"][0], Sight(given["newest"], given.get("reach"), None, protected)
    if "reach" not in given:
        return sight.sees(position, newest)
    number = tpu_row.iota((heads, 1), 0)
    reach = jnp.zeros((heads, 1), jnp.int32)
    for head in range(heads):  # from scalar memory into a column
        reach = jnp.where(number == head, given["reach"][row, head], reach)
    return sight.sees(position, newest, reach)
