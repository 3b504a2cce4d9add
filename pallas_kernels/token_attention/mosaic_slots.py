"""Slots in the Mosaic GPU kernel of token attention: its operands, the copies of a step into shared
memory, and how a warpgroup holds slots.

What the chip asks of a copy (`cp.async.bulk.tensor`), beyond what the compiler checks: it begins at
a multiple of 16 bytes in global memory, also after the coordinates along the last axis are added
(an H200 stops with CUDA_ERROR_ILLEGAL_INSTRUCTION otherwise), and at one of 128 bytes in shared
memory.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.refs import one_number
from pallas_kernels.shared import mosaic_operands as mosaic
from pallas_kernels.token_attention.operands import (
    HeadSlots,
    NewToken,
    Query,
    kernel_operands,
    visible,
)

CLASSES = 16  # of slots: 4 warps by 4 slots
LANES = 8  # threads that share a slot
WINDOW = 64  # columns: heads are seen through one or two of them
LINE = 32  # numbers: places in shared memory begin at multiples of 128 bytes
SUMMED = (LINE, 2 * LINE, 4 * LINE)  # sums of weights that are changed at once
ALIGNED = 4  # numbers of 4 bytes: where copies may begin
LONGEST = 128  # slots of a step, at most; copies take up to 256 numbers along an axis
STEP_BYTES = 2**14  # of the pool, about: three steps fit, and several programs
Number = int | Int[Array, ""]


def slots_of_step(pool) -> int:
    """Slots that a program takes at once, a multiple of `LINE`."""
    slot = pool.shape[-1] * pool.dtype.itemsize
    # no step is larger than a head, because no copy may be
    return max(LINE, min(STEP_BYTES // slot, LONGEST, pool.shape[2]) // LINE * LINE)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlatOperands:
    """Operands of the kernel, and in the kernel references to them.

    Arrays that are copied are flat, because the rows of other arrays would have to be multiples of
    16 bytes: q [R M W] in whole windows, position [R M C] or fewer, scale [R 2 M C]. Single numbers
    are arrays of one.

    token: key and value that are stored on the way, [R M H]; the pool is then a reference outside
      of the kernel, too, and changes in place. None: nothing is stored.
    wanted: int32, whether the scores of `Query.probe` are; None: there is no probe.
    shared: whether all rows have the same positions, and whether all heads have.
    size: of a head.
    step: slots of a step.
    """

    query: Query
    slots: HeadSlots
    token: NewToken | None
    wanted: Int[Array, " 1"] | None
    shared: tuple[bool, bool] = field(metadata=dict(static=True))
    size: int = field(metadata=dict(static=True))
    step: int = field(metadata=dict(static=True))

    @classmethod
    def of(
        cls, step: int, query: Query, slots: HeadSlots, token: NewToken | None
    ) -> "FlatOperands":
        by_row, by_head, _ = slots.position.shape
        if token is not None:
            k, v = (a.astype(slots.pool.dtype).reshape(-1) for a in (token.k, token.v))
            token = NewToken(k, v, token.slot.reshape(1))
        wanted = None if query.probe is None else one_number(query.probe.wanted)
        query, slots = kernel_operands(query, slots, "Mosaic token attention")
        shortest = _line(step, slots.pool.shape[2])

        def flat(path, array):
            match path[-1].name:
                case "q":
                    return mosaic.padded(array, 2, WINDOW).reshape(-1)
                case "position":  # no array is smaller than a copy
                    return mosaic.padded(array.reshape(-1), 0, 1, shortest)
                case "scale":
                    return array.reshape(-1)
                case "pool" if token is not None:
                    return jax.new_ref(array)
                case "mass" | "scores":
                    return None  # changed in place, which takes a reference of its own
            return array

        # of the queries as they came: `flat` fills windows with zeros
        size = query.q.shape[-1]
        query, slots = jax.tree_util.tree_map_with_path(flat, (query, slots))
        return cls(query, slots, token, wanted, (by_row == 1, by_head == 1), size, step)

    @property
    def width(self) -> int:
        """Columns that the windows of a head have together."""
        return pl.cdiv(self.size, WINDOW) * WINDOW

    @property
    def heads(self) -> int:
        return self.slots.pool.shape[1]

    @property
    def count(self) -> int:
        """Slots of a head."""
        return self.slots.pool.shape[2]

    @property
    def buffers(self) -> int:
        """Places in shared memory: fewer of large steps, so that two programs fit."""
        pool = self.slots.pool
        return 3 if self.step * pool.shape[-1] * pool.dtype.itemsize <= STEP_BYTES else 2

    @property
    def steps(self) -> Number:
        """Steps of a head that have slots in use."""
        used, size = self.slots.used, self.step
        return pl.cdiv(self.count, size) if used is None else (used[0] + size - 1) // size

    def shift(self, begin):
        """Number of copied elements that lie in front of place `begin`."""
        return 0 if self.count % ALIGNED == 0 else jax.lax.rem(begin, ALIGNED)

    def positions(self, row, head):
        """Offset of the positions of a head."""
        by_row, by_head = self.shared
        rows = 0 if by_row else row * (1 if by_head else self.heads)
        return (rows + (0 if by_head else head)) * self.count

    def scales(self, row, head, half: int):
        """Offset of the scales of a head's keys (half 0) or values."""
        return ((2 * row + half) * self.heads + head) * self.count

    def limits(self, number) -> tuple:
        """Newest position that a head sees, how many it sees, bias of its first slot; 0 for what
        does not limit or change anything."""
        row, head = number // self.heads, jax.lax.rem(number, self.heads)
        newest, reach, bias = self.query.newest, self.slots.reach, self.query.first_bias
        newest = jnp.int32(0) if newest is None else newest[0]
        reach = jnp.int32(0) if reach is None else reach[row, head]
        return newest, reach, jnp.float32(0) if bias is None else bias[row]

    def sees(self, position, newest, reach):
        """Mask of the positions that a head with these `limits` sees."""
        # static: what the call does not limit is not compared at all
        newest = None if self.query.newest is None else newest
        reach = None if self.slots.reach is None else reach
        return visible(position, newest, reach, self.query.protected)


def _line(size: int, count: int) -> int:
    """Numbers that are copied for `size` of a head's `count` slots: more where a head's may begin
    between two places that copies may begin at."""
    return size if count % ALIGNED == 0 else size + LINE


class Places(NamedTuple):
    """Shared memory of a program, with a place for each of `FlatOperands.buffers` steps.

    pool: [buffers, slots, 2 H].
    q: [buffers, W].
    position: [buffers, `_line`].
    scale: for an int8 pool, two references like `position`, for keys and for values; else none.
    token: two references [buffers, H], for the key and the value that are stored; else none.
    full: a barrier for each place.
    """

    pool: jax.Ref
    q: jax.Ref
    position: jax.Ref
    scale: list[jax.Ref]
    token: list[jax.Ref]
    full: jax.Ref

    @classmethod
    def scratch(cls, given: FlatOperands) -> "Places":
        """Scratch shapes that Pallas makes them from."""
        size, buffers = given.step, given.buffers
        line = buffers, _line(size, given.count)
        pool, q = given.slots.pool, given.query.q
        scale = [] if given.slots.scale is None else [plgpu.SMEM(line, jnp.float32)] * 2
        stored = [] if given.token is None else 2 * [plgpu.SMEM((buffers, given.size), pool.dtype)]
        return cls(
            plgpu.SMEM((buffers, size, pool.shape[-1]), pool.dtype),
            plgpu.SMEM((buffers, given.width), q.dtype),
            plgpu.SMEM(line, jnp.int32),
            scale,
            stored,
            # each copy of a step arrives once: slots, query, positions, scales, key and value
            plgpu.Barrier(num_arrivals=3 + len(scale) + len(stored), num_barriers=buffers),
        )


@dataclass(frozen=True)
class PlaceRing:
    """A ring of places in shared memory. A program's steps use them in turn, head after head.

    first: number of the program's first head.
    heads: how many heads the program has.
    each: steps of a head.
    """

    given: FlatOperands
    places: Places
    first: Number
    heads: Number
    each: Number

    def store(self, place, head: tuple, start) -> None:
        """Store the token of a head, if its slot is among those of the step from slot `start` on:
        in the place of the step, for attention, and from there in the pool."""
        given, size = self.given, self.given.size
        slot = given.token.slot[0]
        here, layout = slot - start, line(size)

        @pl.when((here >= 0) & (here < self.given.step))
        def _():
            row = self.places.pool.at[place, here]
            for half, new in enumerate(self.places.token):
                numbers = mosaic.load(new.at[place], layout, plain=True)
                mosaic.store(row.at[pl.ds(half * size, size)], numbers)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(row, given.slots.pool.at[*head, slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the place is taken again

    def start(self, number) -> None:
        """Start copying step `number`, if the program has it."""

        @pl.when(number < self.heads * self.each)
        def _():
            given, size, places = self.given, self.given.step, self.places
            query, slots = given.query, given.slots
            # the query is copied for every step, since the next step may be another head's
            i, start = self.first + number // self.each, jax.lax.rem(number, self.each) * size
            row, head = i // given.heads, jax.lax.rem(i, given.heads)
            lines = [(slots.position, places.position, given.positions(row, head))]
            for half, scale in enumerate(places.scale):
                lines.append((slots.scale, scale, given.scales(row, head, half)))
            # what lies beyond the end of a head, or of an array, is not read
            copies = [
                (slots.pool.at[row, head, pl.ds(start, size)], places.pool),
                (query.q.at[pl.ds(i * given.width, given.width)], places.q),
            ]
            if given.token is not None:  # for every step, as the query
                own = pl.ds(i * given.size, given.size)
                both = zip((given.token.k, given.token.v), places.token, strict=True)
                copies += [(source.at[own], target) for source, target in both]
            for source, target, begin in lines:
                # the numbers of a head begin anywhere, a copy only at a multiple of 16 bytes
                here = pl.ds(begin - given.shift(begin) + start, _line(size, given.count))
                copies.append((source.at[here], target))
            place = jax.lax.rem(number, given.buffers)
            for source, target in copies:
                plgpu.copy_gmem_to_smem(source, target.at[place], places.full.at[place])


class Layouts(NamedTuple):
    """Layouts of 16 slots in a warpgroup, one of each class, in Mosaic GPU's terms: the thread that
    has each number.

    tile: [16, columns]. 8 threads share a slot; neighbouring threads hold neighbouring columns, at
      most 16 bytes each.
    joined: the same numbers with the columns divided over the warps, so that sums over slots need
      no other warp.
    slot, column: one number per slot, or per column, of a tile.
    """

    tile: object
    joined: object
    slot: object
    column: object

    @classmethod
    def of(cls, dtype) -> "Layouts":
        # 16 bytes per load and thread; numbers of 1 byte are not loaded 16 at a time
        vector, rows = 4 if jnp.dtype(dtype).itemsize == 4 else 8, CLASSES // 4
        wide, layout, part = LANES * vector, plgpu.Layout.TILED, WINDOW // 4
        tile = plgpu.Tiling(((CLASSES, wide), (rows, wide), (vector,)))
        joined = plgpu.Tiling(((CLASSES, WINDOW), (CLASSES, part), (8, part), (4,)))
        tile = layout(tile, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
        joined = layout(joined, warp_dims=(-6,), lane_dims=(-3, -2), vector_dim=-1)
        return cls(tile, joined, tile.reduce(1), tile.reduce(0))

    def across(self, slots, width: int):
        """Repeat a number per slot for every column."""
        wide = jax.lax.broadcast_in_dim(slots, (CLASSES, width), [0])
        return plgpu.layout_cast(wide, self.tile)

    def down(self, columns):
        """Repeat a number per column for every slot."""
        wide = jax.lax.broadcast_in_dim(columns, (CLASSES, *columns.shape), [1])
        return plgpu.layout_cast(wide, self.tile)


def line(size: int) -> object:
    """The layout of a line of 32, 64 or 128 numbers of 4 bytes in global memory. A warp holds a
    run of them, 32 bytes at least: memory moves whole sectors of 32 bytes, and a warp that writes a
    part of one writes as much. Threads without a number of their own repeat another's."""
    each = size // 4  # numbers of a warp
    if each == 32:
        tiling = plgpu.Tiling(((size,), (each,), (1,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    copies = 32 // each
    tiling = plgpu.Tiling(((size, copies), (each, copies), (1,)))
    wide = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    return wide.reduce(1)
