"""Moves of slots on TPU (Mosaic). See `api.move_all`.

XLA's scatter moves one slot after the other. The kernel goes through the pool once, in place: a
grid step serves all heads of some rows, or some heads of one row.

A matrix says what comes where: a row for every slot of a head [C, W], a column for every slot of
its buffer, a single 1 in the rows of slots that change. The matrix times the buffer is what comes.
Numbers would not survive such a product: NaN spoils a whole column, and -0 becomes 0. Bytes do
survive it: they are small integers, which are exact as bfloat16 factors and float32 sums. Two bytes
of a number are factors side by side, 256 b_1 + b_0, and 2**23 beside them where anything comes at
all. The product is then a float32 whose lower 16 bits are those of the number, and 0 where nothing
comes. So one product finds what comes, and where; numbers of four bytes take two.

Time. For 20 heads of 105 slots of 128 bfloat16 numbers the kernel compiled for a v5e has 726
instructions, one cycle each; its memory takes 2100 cycles to read and write them. How many slots
move hardly matters.

Traffic, with b bytes per element: R N (C + C') W b for the pool, read and written up to the last
slot that a token may come to (W padded to 128, C and C' to 8); per slot that moves 12 bytes for
where it goes.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import estimates
from pallas_kernels.shared import tpu_slots
from pallas_kernels.shared.tpu_operands import pools, rounded
from pallas_kernels.token_attention import tpu_call
from pallas_kernels.token_attention.tpu_row import iota

MOST_BYTES = 2**21  # of the pool in a grid step; there four times, in 16 MiB of vector memory
MOST_NUMBERS = 2**20  # of a head, which may lie there in 32 bits
LINES = 16  # of the buffer's bytes, a multiple: a tile of bfloat16
SOMETHING = 2.0**23  # in a float32 of this size the lowest bit counts 1
FACTORS = (256.0, 1.0, SOMETHING)  # of the upper bytes, of the lower ones, and of ones


def move_all(layers, target, below=None, *, interpret, most_bytes: int = MOST_BYTES):
    """See `api.move_all`: one layer after the other. most_bytes: of the pool in a grid step."""
    given = zip(layers, jnp.split(target, len(layers)), strict=True)
    return tuple(_move(*of_layer, below, interpret, most_bytes) for of_layer in given)


def _move(slots, target, below: int | None, interpret, most_bytes: int):
    """The slots of a layer after the moves."""
    pool = slots.pool
    most = min(most_bytes, MOST_NUMBERS * pool.dtype.itemsize)
    together, some = tpu_slots.steps(pool, "moves of slots take", most)
    rows, heads, count, width = pool.shape
    # the first slot of the tile in which the buffer begins
    tile, last = tpu_slots.tile(pool.dtype), target.shape[-1]
    begin = (count - last) // tile * tile
    lines = rounded(count - begin, LINES)
    before = count - last - begin  # slots of the tile that are no part of the buffer
    edges = ((0, 0), (0, 0), (before, lines - before - last))
    # targets of this slot and of all behind it (-1: nowhere), once for each of `FACTORS`; those of
    # all heads: a line per head begins anywhere, a block of lines does not
    places = jnp.pad(target, edges, constant_values=-1)
    places = jnp.concatenate([places] * len(FACTORS), axis=-1)
    written = _written(pool, below, interpret)

    def spec(slots: int) -> pl.BlockSpec:
        return pl.BlockSpec((together, some, slots, width), lambda r, n: (r, n, 0, 0))

    moved = pl.pallas_call(
        partial(_move_rows, begin),
        grid=(rows // together, heads // some),
        in_specs=[pl.BlockSpec((together, *places.shape[1:]), lambda r, n: (r, 0, 0)), spec(count)],
        out_specs=spec(written),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=estimates.move_slots(pool, places, written),
        interpret=interpret,
        name="slot_moves",
    )(places, pools(pool, None, interpret)[0])
    # the compiler refuses an aliased result in HBM that is a donated argument and a result at once
    moved = jax.lax.optimization_barrier(moved)
    if slots.scale is None:
        return replace(slots, pool=moved)
    return replace(slots, pool=moved, scale=_moved_scales(slots.scale, target))


def _written(pool, below: int | None, interpret) -> int:
    """Slots that are written, the first ones: whole tiles, which the compiler can write."""
    count = pool.shape[2]
    # the interpreter pads operands and results to whole blocks, then takes one for the other
    if below is None or interpret is True:
        return count
    return min(count, rounded(below, tpu_call.tile_of(pool, count, interpret)))


def _moved_scales(scale, target):
    """Scales after the moves. There are only two per slot, so XLA selects them."""
    slots, last = scale.shape[-1], target.shape[-1]
    # a comparison with all slots in place of a scatter, which goes slot by slot
    comes = target[:, None, :, :, None] == jnp.arange(slots)  # [R, 1, M, P, C]
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    new = jnp.where(comes, bits[..., slots - last :, None], 0).sum(-2, dtype=jnp.int32)
    found = jnp.where(comes.any(-2), new, bits)
    return jax.lax.bitcast_convert_type(found, scale.dtype)


def _move_rows(begin: int, places_ref, pool_ref, out_ref):
    rows, some = pool_ref.shape[:2]
    first = pl.program_id(1) * some

    def row(i, _):
        for j in range(some):
            places = places_ref[i, pl.ds(first + j, 1)]
            out_ref[i, j] = _moved(begin, places, pool_ref.at[i, j], out_ref.shape[2])
        return 0

    jax.lax.fori_loop(0, rows, row, 0)


def _moved(begin: int, places, slots_ref, count: int):
    """The first `count` slots of one head [C', W] after the moves. places: the head's, [1, 3
    lines]."""
    dtype, lines = slots_ref.dtype, places.shape[1] // 3
    group = iota((1, 3 * lines), 1) // lines
    factors = jnp.where(group == 0, FACTORS[0], jnp.where(group == 1, *FACTORS[1:]))
    comes = jnp.where(iota((count, 3 * lines), 0) == places, factors, 0.0).astype(jnp.bfloat16)
    buffer = _bits(slots_ref[begin:])
    # whole tiles of a factor; nothing goes from the lines that are added
    buffer = jnp.pad(buffer, ((0, lines - len(buffer)), (0, 0)))
    new = found = _product(comes, buffer)
    if dtype.itemsize == 4:
        new = (_product(comes, buffer >> 16) << 16) | (found & 0xFFFF)
    return _numbers(jnp.where(found != 0, new, _bits(slots_ref[:count])), dtype)


def _product(comes, buffer):
    """int32 [C, W]: the lower 16 bits are those of what comes to every slot; 0: nothing comes."""
    pair = [(buffer >> 8) & 0xFF, buffer & 0xFF, jnp.ones_like(buffer)]
    pair = jnp.concatenate([a.astype(jnp.float32) for a in pair]).astype(jnp.bfloat16)
    once = jax.lax.Precision.DEFAULT  # is exact; a precision that the user set would not compile
    found = jax.lax.dot_general(
        comes, pair, (((1,), (0,)), ((), ())), precision=once, preferred_element_type=jnp.float32
    )
    return jax.lax.bitcast_convert_type(found, jnp.int32)


def _bits(numbers):
    """The bits of numbers in int32; above these bits there may be anything."""
    if numbers.dtype == jnp.bfloat16:
        numbers = jax.lax.bitcast_convert_type(numbers, jnp.int16)
    if numbers.dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(numbers, jnp.int32)
    return numbers.astype(jnp.int32)


def _numbers(bits, dtype):
    """The inverse of `_bits`, which ignores what is above them."""
    if dtype == jnp.int8:
        return bits.astype(jnp.int8)
    small = bits.astype(jnp.int16) if dtype.itemsize == 2 else bits
    return jax.lax.bitcast_convert_type(small, dtype)
