"""Slots in the Mosaic GPU kernel of token attention: what it is given, how what a step needs comes
into shared memory, and how a warpgroup holds it.

What the chip asks of a copy (`cp.async.bulk.tensor`), beyond what the compiler checks: it begins at
a multiple of 16 bytes in global memory, also after the coordinates along the last axis are added
(an H200 stops with CUDA_ERROR_ILLEGAL_INSTRUCTION otherwise), and at one of 128 bytes in shared
memory.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_operands as mosaic
from pallas_kernels.token_attention.sight import Sight

CLASSES = 16  # of slots: 4 warps by 4 slots
LANES = 8  # threads that share a slot
WINDOW = 64  # columns: heads are seen through one or two of them
LINE = 32  # numbers: places in shared memory begin at multiples of 128 bytes
ALIGNED = 4  # numbers of 4 bytes: where copies may begin
LONGEST = 128  # slots of a step, at most; copies take up to 256 numbers along an axis
STEP_BYTES = 2**14  # of the pool, about


@dataclass(frozen=True)
class Steps:
    """How a head's slots are cut. slots: of a step, a multiple of 32. buffers: places in shared
    memory. programs: that divide all heads; None: as many as run at the same time."""

    slots: int
    buffers: int = 3  # 2 of large steps, so that two programs fit
    programs: int | None = None

    @classmethod
    def of(cls, pool) -> "Steps":
        slot = pool.shape[-1] * pool.dtype.itemsize
        # no step is larger than a head
        slots = max(LINE, min(STEP_BYTES // slot, LONGEST, pool.shape[2]) // LINE * LINE)
        return cls(slots, buffers=3 if slots * slot <= STEP_BYTES else 2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """What a call is given, as operands of a kernel and in it as references.

    Flat, because the rows of other arrays would have to be multiples of 16 bytes: q [R N W] in
    whole windows, position [R N C] or fewer, scale [R 2 N C]. Single numbers are arrays of one: of
    sums the weight, of `sight` the newest position and the slots in use.
    shared: positions by all rows, by all heads. size: of a head.
    """

    q: Any
    pool: Any
    position: Any
    scale: Any
    sight: Sight
    bias: Any
    weight: Any
    shared: tuple[bool, bool] = field(metadata=dict(static=True))
    size: int = field(metadata=dict(static=True))

    @classmethod
    def of(cls, steps: Steps, q, pool, position, scale, sight: Sight, **numbers) -> "Given":
        flat = [None if a is None else a.reshape(-1) for a in (position, scale)]
        given = cls(
            q=mosaic.padded(q, 2, WINDOW).reshape(-1),
            pool=pool,
            position=flat[0],
            scale=flat[1],
            sight=replace(sight, newest=_single(sight.newest), used=_single(sight.used)),
            shared=(position.shape[0] == 1, position.shape[1] == 1),
            size=q.shape[-1],
            **numbers,
        )
        # no array is smaller than a copy
        return replace(given, position=mosaic.padded(flat[0], 0, 1, given.line(steps.slots)))

    @property
    def width(self) -> int:
        """Columns of the windows of a head."""
        return pl.cdiv(self.size, WINDOW) * WINDOW

    @property
    def slots(self) -> int:
        return self.pool.shape[2]

    def steps(self, size: int) -> int:
        """Of a head."""
        return pl.cdiv(self.slots, size)

    def used_steps(self, size: int) -> Any:
        """Those with slots that are in use."""
        used = self.sight.used
        return self.steps(size) if used is None else (used[0] + size - 1) // size

    def line(self, size: int) -> int:
        """How many numbers are copied for so many slots: more where a head's may begin between two
        places that copies may begin at."""
        return size if self.slots % ALIGNED == 0 else size + LINE

    def shift(self, begin):
        """How many of the numbers copied from place `begin` on lie in front of it."""
        return 0 if self.slots % ALIGNED == 0 else jax.lax.rem(begin, ALIGNED)

    def positions(self, row, head):
        """Where those of a head begin."""
        by_row, by_head = self.shared
        rows = 0 if by_row else row * (1 if by_head else self.pool.shape[1])
        return (rows + (0 if by_head else head)) * self.slots

    def scales(self, row, head, half: int):
        """Where those of a head's keys or values begin."""
        return ((2 * row + half) * self.pool.shape[1] + head) * self.slots

    def place(self, number) -> tuple:
        """Row and head of one of the R N heads."""
        return number // self.pool.shape[1], jax.lax.rem(number, self.pool.shape[1])

    def limits(self, number) -> tuple:
        """(newest visible position, how many are seen, bias of the first slot) of a head."""
        row, head = self.place(number)
        newest, reach = self.sight.newest, self.sight.reach
        newest = jnp.int32(0) if newest is None else newest[0]
        reach = jnp.int32(0) if reach is None else reach[row, head]
        return newest, reach, jnp.float32(0) if self.bias is None else self.bias[row]


def _single(number) -> Any:
    """An array of one, which kernels take; None stays."""
    return None if number is None else jnp.asarray(number, jnp.int32).reshape(1)


@dataclass(frozen=True)
class Ring:
    """Places in shared memory that steps go through, those of one head after those of another.

    pool: [buffers, slots, 2 H]. q: [buffers, W]. position: [buffers, `Given.line`]. scale: of an
    int8 pool, two such arrays, for keys and values; else empty. full: barriers. first: head of the
    program. heads: how many it has. each: steps of a head.
    """

    given: Given
    steps: Steps
    pool: Any
    q: Any
    position: Any
    scale: Any
    full: Any
    first: Any
    heads: Any
    each: Any

    @staticmethod
    def scratch(given: Given, steps: Steps) -> list:
        """Shared memory for it, in the order of its fields."""
        size, buffers = steps.slots, steps.buffers
        line = buffers, given.line(size)
        scale = [] if given.scale is None else [plgpu.SMEM(line, jnp.float32)] * 2
        return [
            plgpu.SMEM((buffers, size, given.pool.shape[-1]), given.pool.dtype),
            plgpu.SMEM((buffers, given.width), given.q.dtype),
            plgpu.SMEM(line, jnp.int32),
            scale,
            plgpu.Barrier(num_arrivals=3 + len(scale), num_barriers=buffers),
        ]

    def fill(self) -> None:
        """Start copying the first steps."""
        for number in range(self.steps.buffers):
            self._start(jnp.int32(number))

    def wait(self, number) -> Any:
        """Until a step is there; its place."""
        place = jax.lax.rem(number, self.steps.buffers)
        plgpu.barrier_wait(self.full.at[place])
        return place

    def release(self, number) -> None:
        """A step's place takes the one that follows in it."""
        plgpu.commit_smem()  # every warp has read what lies there
        self._start(number + self.steps.buffers)

    def _start(self, number) -> None:
        pl.when(number < self.heads * self.each)(partial(self._copy, number))

    def _copy(self, number) -> None:
        given, size = self.given, self.steps.slots
        i, start = self.first + number // self.each, jax.lax.rem(number, self.each) * size
        row, head = given.place(i)
        lines = [(given.position, self.position, given.positions(row, head))]
        for half, scale in enumerate(self.scale):
            lines.append((given.scale, scale, given.scales(row, head, half)))
        # what lies beyond the end of a head, or of an array, is not read
        copies = [
            (given.pool.at[row, head, pl.ds(start, size)], self.pool),
            (given.q.at[pl.ds(i * given.width, given.width)], self.q),
        ]
        for source, target, begin in lines:
            here = pl.ds(begin - given.shift(begin) + start, given.line(size))
            copies.append((source.at[here], target))
        place = jax.lax.rem(number, self.steps.buffers)
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target.at[place], self.full.at[place])


@dataclass(frozen=True)
class Layouts:
    """How a warpgroup holds slots, one of each class. tile: [16, columns], 8 threads for a slot,
    neighbours of which hold neighbouring columns, 16 bytes of them at most. joined: the same
    numbers, columns by warp, so that sums over slots need no other warp."""

    tile: Any
    joined: Any

    @classmethod
    def of(cls, dtype) -> "Layouts":
        vector, rows = 4 if jnp.dtype(dtype).itemsize == 4 else 8, CLASSES // 4
        wide, layout, part = LANES * vector, plgpu.Layout.TILED, WINDOW // 4
        tile = plgpu.Tiling(((CLASSES, wide), (rows, wide), (vector,)))
        joined = plgpu.Tiling(((CLASSES, WINDOW), (CLASSES, part), (8, part), (4,)))
        return cls(
            layout(tile, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1),
            layout(joined, warp_dims=(-6,), lane_dims=(-3, -2), vector_dim=-1),
        )

    @property
    def slot(self) -> Any:
        """A number per slot."""
        return self.tile.reduce(1)

    @property
    def column(self) -> Any:
        return self.tile.reduce(0)

    def across(self, slots, width: int):
        """A number per slot for every column."""
        wide = jax.lax.broadcast_in_dim(slots, (CLASSES, width), [0])
        return plgpu.layout_cast(wide, self.tile)

    def down(self, columns):
        """A number per column for every slot."""
        wide = jax.lax.broadcast_in_dim(columns, (CLASSES, *columns.shape), [1])
        return plgpu.layout_cast(wide, self.tile)
