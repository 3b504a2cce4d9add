"""Scores of a few queries of every head with its slots, on TPU (Mosaic). See `api.scores`.

Tiling. A grid step serves all heads of some rows, or some heads of one row. Pallas fetches their
part of the pool in one piece while the last step's is in use. A head's queries are multiplied with
its keys. The values beside them are fetched, since they share the tiles, but not read.

Precision. The reference multiplies in the wider type of queries and pool, and on a v5e XLA turns
the products of one query into sums in float32, whatever `jax_default_matmul_precision` says. So no
float32 query is rounded here. Pools in bfloat16 or int8 enter the matrix unit as they are. A
float32 query is the exact sum of three bfloat16 numbers, and the three are side by side in one
product, so keys are read once. Products of a float32 pool name the highest precision.

Traffic, with b bytes per element: R N C 2 H b for the pool, read once (C padded to a tile of 8, 16
or 32, 2 H to 128), and per slot 4 bytes for each query's score, 4 for an int8 pool's scales.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import estimates
from pallas_kernels.shared import tpu_slots
from pallas_kernels.shared.tpu_operands import pools

MOST_BYTES = 2**22  # of pool and scores in a grid step; there twice, in 16 MiB of vector memory
UPPER = -(2**16)  # the sign, the exponent and 7 bits of a float32: what bfloat16 has


def scores(q, slots, first: int, *, interpret, most_bytes: int = MOST_BYTES):
    """See `api.scores`. q: [R, M, Q, H], the queries of a group among the Q. most_bytes: of a grid
    step."""
    rows, heads, count, size = q.shape
    total = slots.pool.shape[2]
    exact, single = q.dtype != jnp.bfloat16, count == 1
    # scores lie in vector memory as well, once per head
    more = tpu_slots.plane_bytes(count, total, jnp.dtype("float32"))
    together, some = tpu_slots.steps(slots.pool, "token scores take", most_bytes, more)
    # one query per head: heads are the lines of a matrix, and lines of 4 bytes begin anywhere
    queries = q[:, :, 0].astype(jnp.float32) if single else q
    pool = pools(slots.pool, None, interpret)[0]
    shape = (rows, heads, total - first) if single else (rows, heads, count, total - first)
    found = jax.ShapeDtypeStruct(shape, jnp.float32)
    of_step = partial(_spec, rows=together, heads=some)
    scales = slots.scale
    if scales is not None:  # of keys alone: the first half of the second axis
        shape = (together, 1, *scales.shape[2:])
        scales = pl.BlockSpec(shape, lambda r, n: (r, 0, 0, 0))
    found = pl.pallas_call(
        partial(_score_rows, first, some, exact),
        grid=(rows // together, heads // some),
        in_specs=[of_step(queries), of_step(pool), scales],
        out_specs=of_step(found),
        out_shape=found,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=estimates.token_scores(q, slots.pool, slots.scale),
        interpret=interpret,
        name="token_scores",
    )(queries, pool, slots.scale)
    return found[:, :, None] if single else found


def _spec(array, *, rows: int, heads: int) -> pl.BlockSpec:
    """The part of an operand or the result in grid step (r, n): its rows, and where every head has
    a matrix, its heads."""
    if len(array.shape) == 3:
        return pl.BlockSpec((rows, *array.shape[1:]), lambda r, n: (r, 0, 0))
    return pl.BlockSpec((rows, heads, *array.shape[2:]), lambda r, n: (r, n, 0, 0))


def _score_rows(first: int, some: int, exact: bool, queries, pool, scale, out_ref):
    single, size = len(queries.shape) == 3, queries.shape[-1]
    begin = pl.program_id(1) * some

    def row(i, _):
        for j in range(some):
            line = pl.ds(begin + j, 1)
            here = (i, line) if single else (i, j)  # a line of the row's matrix, or a matrix
            mine, factor = queries[here], None if scale is None else scale[i, 0, line]
            found = of_head(mine, pool[i, j, :, :size], factor, exact=exact)
            out_ref[here] = found[:, first:]  # the slots before `first` are cut off here
        return 0

    jax.lax.fori_loop(0, len(pool), row, 0)


def of_head(queries, keys, scale, *, exact: bool):
    """Scores [Q, C] of queries [Q, H] and the keys [C, H] of one head, in a kernel.

    scale: factors [1, C] of an int8 pool's keys, or None.
    exact: whether the queries have more digits than bfloat16 numbers.
    """

    def product(a, b, precision=jax.lax.Precision.DEFAULT):
        # the precision is always named: see `tpu_blocks.dot`
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)

    if keys.dtype == jnp.float32:
        found = product(queries.astype(jnp.float32), keys, jax.lax.Precision.HIGHEST)
    else:
        keys = keys.astype(jnp.bfloat16)  # exact for int8
        # three times as many lines of the left factor, which is small; keys are loaded once
        parts = _parts(queries.astype(jnp.float32)) if exact else [queries]
        found = product(jnp.concatenate(parts).astype(jnp.bfloat16), keys)
        if exact:  # the largest parts first, as they come: their order is part of the result
            count = len(queries)
            found = found[:count] + found[count : 2 * count] + found[2 * count :]
    # after the product: whole numbers are exact in it
    return found if scale is None else found * scale


def _parts(numbers) -> list:
    """Three float32 arrays whose sum is `numbers`, each of numbers that bfloat16 represents."""
    found = []
    for _ in range(2):
        # cut, not rounded: a compiler may leave out a rounding whose result becomes float32 again
        bits = jax.lax.bitcast_convert_type(numbers, jnp.int32) & UPPER
        found.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
        numbers = numbers - found[-1]
    return [*found, numbers]
