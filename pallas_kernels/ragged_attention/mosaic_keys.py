"""Keys and values in the Mosaic GPU attention kernels: the steps in which a head sees them, and
their way into shared memory. One warpgroup fetches, each of its warps a part of every step, and
others compute on what has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.refs import Operand, Ref, Scalar, one_number
from pallas_kernels.shared import mosaic_operands as mosaic
from pallas_kernels.shared.mosaic_products import LAYOUT
from pallas_kernels.tables import RANGE_BITS, WORD

# Blocks with at least this many slots have scales that a copy can take: copies have a least length.
SCALES_COPIED = 32
WARPS = 4  # of a warpgroup


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredBlocks:
    """The pool and the table of a call as operands of a kernel, and inside it as references.

    table: `BlockTable.packed` with one more axis in front, of layers or rows.
    layer: int32 [1], place in that axis unless `per_row`.
    scales: scales of an int8 pool, as they are or, for small blocks, those of the table's slots
      side by side [R, N, 2, P].
    size: keys of a step.
    entries: M.
    finite: whether slots of the pool, and own values, are known not to be NaN.
    """

    table: Operand
    layer: Operand
    pool: Operand
    scales: Operand
    size: int = field(metadata=dict(static=True))
    entries: int = field(metadata=dict(static=True))
    per_row: bool = field(metadata=dict(static=True))
    finite: tuple[bool, bool] = field(metadata=dict(static=True))

    @classmethod
    def of(cls, kv_pool, kv_scale, table, size: int, own_finite=False) -> "StoredBlocks":
        if not kv_pool.shape[1]:  # a kernel has no arrays without elements
            kv_pool = mosaic.padded(kv_pool, 1, 1, 1)
            kv_scale = None if kv_scale is None else mosaic.padded(kv_scale, 1, 1, 1)
        scales = kv_scale
        if kv_scale is not None and kv_pool.shape[2] < SCALES_COPIED:
            # XLA gathers them in table order: copies inside the kernel would be too short
            ids, rows = table.with_rows()[0], jnp.arange(len(kv_scale))[:, None, None]
            both = kv_scale[rows, ids].reshape(len(kv_scale), *ids.shape[1:], 2, -1)
            lines = jnp.moveaxis(both, 3, 2).reshape(len(kv_scale), ids.shape[1], 2, -1)
            scales = mosaic.padded(lines, 3, size, size)
        packed, per_row = mosaic.packed(table.with_packed(kv_pool.shape[2]))
        arrays = (packed, one_number(table.layer), kv_pool, scales)
        # int8 numbers are finite, and their scales are left out where they do not count
        finite, entries = (table.finite or scales is not None, own_finite), table.ids.shape[-1]
        return cls(*arrays, size=size, entries=entries, per_row=per_row, finite=finite)

    @property
    def block_size(self) -> int:
        return self.pool.shape[2]

    @property
    def scaled(self) -> bool:
        """Whether the pool holds int8."""
        return self.scales is not None

    @property
    def scales_by_block(self) -> bool:
        return self.scaled and len(self.scales.shape) == 3

    @property
    def pieces(self) -> int:
        """Blocks that make a step."""
        return self.size // self.block_size

    @property
    def copies(self) -> int:
        """Copies that fill a place. Own keys take as many, although they have no scales."""
        return self.pieces + self.scaled * (self.pieces if self.scales_by_block else 1)

    def scratch(self, buffers: int, head_dim: int) -> list:
        """Shared memory for what an int8 pool holds, and for its scales."""
        if not self.scaled:
            return []
        raw = mosaic.tile((buffers, self.size, head_dim), jnp.int8, head_dim)
        return [raw, plgpu.SMEM((buffers, self.size), jnp.float32)]


@dataclass(frozen=True)
class PoolHalf:
    """Keys or values.

    half: 0 for keys, 1 for values.
    places: room for steps in shared memory.
    full, free: barriers that say which places are. No `free` where the warpgroup that computes
      fetches as well.
    raw: room for steps of an int8 pool before they are converted.
    scales: room for the scales of these steps.
    """

    half: int
    places: Ref
    full: Ref
    free: Ref | None
    raw: Ref | None = None
    scales: Ref | None = None

    def release(self, place) -> None:
        """Say that the place may be filled again."""
        if self.raw is not None:
            plgpu.commit_smem()  # ordinary loads and the copies that follow take different ways
        if self.free is not None:
            plgpu.barrier_arrive(self.free.at[place])


@dataclass(frozen=True)
class Keys:
    """The keys and values that one head of one row sees, step by step: own ones, then stored ones.

    own: finished keys and values of the scale, [R, T', 2 N H].
    length: real tokens of the scale.
    heads: N.
    lead: place of the head's table in the first axis of `stored.table`.
    used: the number of entries up to the last one that is not empty.
    partial: bits that say which of the first `WORD` entries are partial.
    """

    stored: StoredBlocks
    own: Ref
    length: Scalar
    row: Scalar
    head: Scalar
    heads: int
    lead: Scalar
    used: Scalar
    partial: Scalar

    @classmethod
    def of(cls, stored: StoredBlocks, own, numbers: tuple, row, head, heads: int) -> "Keys":
        """numbers: length and layer, read once per program: every step needs them."""
        length, layer = numbers
        lead = row if stored.per_row else layer
        used, bits = (stored.table[lead, head, 0, 2 * stored.entries + i] for i in (0, 1))
        return cls(stored, own, length, row, head, heads, lead, used, bits)

    def packed(self, place):
        """The number at a place in the head's row of the table."""
        return self.stored.table[self.lead, self.head, 0, place]

    @property
    def own_steps(self):
        return pl.cdiv(self.length, self.stored.size)

    @property
    def steps(self):
        return self.own_steps + pl.cdiv(self.used, self.stored.pieces)

    def entry(self, step, piece):
        """(number of a table entry, the same number within the table). Own keys have no entry, and
        the end of the last step may have none; then some other entry is looked up."""
        entry = (step - self.own_steps) * self.stored.pieces + piece
        return entry, jnp.clip(entry, 0, max(self.stored.entries - 1, 0))

    def copy(self, part: PoolHalf, block, step, piece, place) -> None:
        """Start copying a piece of keys or values to its place, and the scales of its block. block:
        of stored ones; None: own ones, as many as a block has."""
        stored, size, head_dim = self.stored, self.stored.block_size, part.places.shape[-1]

        def start(source, target) -> None:
            rows = pl.ds(piece * size, size)
            plgpu.copy_gmem_to_smem(source, target.at[place, rows], part.full.at[place])

        if block is None:
            here = pl.ds(step * stored.size + piece * size, size)
            columns = pl.ds((part.half * self.heads + self.head) * head_dim, head_dim)
            start(self.own.at[self.row, here, columns], part.places)
        else:
            columns = pl.ds(part.half * head_dim, head_dim)
            target = part.raw if stored.scaled else part.places
            start(stored.pool.at[self.row, block, :, columns], target)
        if stored.scales_by_block:
            # a barrier counts as many copies for every step, so own keys copy some scales, too
            line = pl.ds(part.half * size, size)
            block = 0 if block is None else block
            start(stored.scales.at[self.row, block, line], part.scales)

    def copy_scale_line(self, part: PoolHalf, step, place) -> None:
        """Start copying the scales of a step, which lie side by side."""
        size = self.stored.size
        columns = pl.ds(jnp.maximum(step - self.own_steps, 0) * size, size)
        line = self.stored.scales.at[self.row, self.head, part.half, columns]
        plgpu.copy_gmem_to_smem(line, part.scales.at[place], part.full.at[place])

    def _words(self, step) -> list:
        """A bit per key of a step, lowest first: 1 where it is valid."""
        size, block, own = self.stored.size, self.stored.block_size, step < self.own_steps
        words = [jnp.int32(0)] * (size // WORD)
        for i in range(self.stored.pieces):
            entry, place = self.entry(step, i)
            # 0 is an empty range: nothing is valid behind the last entry in use
            packed = jnp.where(entry < self.used, self.packed(self.stored.entries + place), 0)
            start, stop = packed & (1 << RANGE_BITS) - 1, packed >> RANGE_BITS
            for word in range(i * block // WORD, -(-(i + 1) * block // WORD)):
                before = max(word * WORD - i * block, 0)  # keys of the block in the word before
                bits = _lowest(stop - before) & ~_lowest(start - before)
                words[word] |= bits << i * block % WORD
        left = self.length - step * size
        return [jnp.where(own, _lowest(left - i * WORD), word) for i, word in enumerate(words)]

    def is_partial(self, step):
        """Whether any key of a step is invalid."""
        # most steps are whole, and skip the mask and the clearing of values
        entry, bits = jnp.maximum(self.entry(step, 0)[0], 0), self.partial
        if self.stored.entries > WORD:
            bits = self.packed(2 * self.stored.entries + 1 + entry // WORD)
        # the pieces of a step never lie in two words
        found = bits >> jax.lax.rem(entry, WORD) & (1 << self.stored.pieces) - 1
        own = (step + 1) * self.stored.size > self.length
        return jnp.where(step < self.own_steps, own, found != 0)

    def valid(self, step, shape: tuple[int, ...], axis: int, layout=LAYOUT):
        """Mask of an array whose `axis` runs over the keys of a step."""
        # The ranges are read again wherever a mask is needed, which is in few steps. Registers are
        # too full to keep them.
        key = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        word, *others = self._words(step)
        for i, other in enumerate(others, 1):
            word = jnp.where(key >= i * WORD, other, word)
        # A thread's keys lie 8 apart: it shifts once, and then tests bits that are known when this
        # is compiled.
        return word >> (key & 7) >> (key & 24) & 1 != 0

    def scales(self, part: PoolHalf, step, place, layout):
        """The factors of the scores or weights of a step's keys. Where a key is not valid the
        factor may be anything, NaN included."""
        found = mosaic.load(part.scales.at[place], layout)
        return jnp.where(step < self.own_steps, jnp.ones_like(found), found)


def _lowest(count):
    """A number whose lowest bits are set, so many: none where `count` is negative, at most 32."""
    bits = (jnp.int32(1) << jnp.clip(count, 0, WORD - 1)) - 1
    return jnp.where(count >= WORD, jnp.int32(-1), bits)


@dataclass(frozen=True)
class Fetcher:
    """One warp of those that fetch. A step's pieces go to the warps in turn, keys and values alike;
    where there are fewer pieces than warps, some warps take keys and others values. So a warp
    starts few copies per step, by itself: a copy of the whole warpgroup makes all warps meet.

    parts: keys and values, or keys alone.
    buffers: places of a part.
    """

    warp: Scalar
    stored: StoredBlocks
    parts: Sequence[PoolHalf]
    buffers: int

    @property
    def _together(self) -> int:
        """Warps that share a step of keys or values."""
        return min(WARPS, self.stored.pieces)

    def _pieces(self) -> list:
        first = jax.lax.rem(self.warp, self._together)
        return [first + i for i in range(0, self.stored.pieces, self._together)]

    def _each_part(self, act) -> None:
        """Call `act` with the parts that the warp copies."""
        for turn, part in enumerate(self.parts):
            if self._together == WARPS:
                act(part)
            else:
                mine = jax.lax.div(self.warp, self._together) == turn
                pl.when(mine)(partial(act, part))

    def wait(self, number) -> None:
        """Wait until the place of a step is free. number: of the step, in the program."""
        # A warp waits only where it copies. Nothing would keep it from missing a phase of another
        # barrier, and then it would wait for ever.
        self._each_part(
            lambda part: plgpu.barrier_wait(part.free.at[jax.lax.rem(number, self.buffers)])
        )

    def start(self, keys: Keys, step, number, own: bool) -> None:
        """Start copying the warp's share of a step, of own or of stored keys, as soon as there is a
        place."""
        pieces = self._pieces()
        # looked up before the wait, which takes longer
        blocks = [None if own else keys.packed(keys.entry(step, piece)[1]) for piece in pieces]
        place = jax.lax.rem(number, self.buffers)
        if self.parts[0].free is not None:
            pl.when(number >= self.buffers)(lambda: self.wait(number))

        def of_part(part: PoolHalf) -> None:
            for piece, block in zip(self._pieces(), blocks, strict=True):
                keys.copy(part, block, step, piece, place)
            if self.stored.scaled and not self.stored.scales_by_block:
                first = jax.lax.rem(self.warp, self._together) == 0
                pl.when(first)(lambda: keys.copy_scale_line(part, step, place))

        self._each_part(of_part)

    def start_any(self, keys: Keys, step, number) -> None:
        """`start` of a step of either kind."""
        own = step < keys.own_steps
        pl.when(own)(lambda: self.start(keys, step, number, own=True))
        pl.when(jnp.logical_not(own))(lambda: self.start(keys, step, number, own=False))


def fetch_next(
    keys_of, stored, count, parts: Sequence[PoolHalf], buffers: int, number, following: tuple
) -> tuple:
    """Start copying a step to its place, which nobody reads any more, where the warpgroup that
    computes fetches as well. number: of the step, in the program. following: tile, step, steps of
    this tile. Returns those of the next step; the other arguments are those of `fetch_all`."""
    tile, step, steps = following

    @pl.when(tile < count)
    def _():
        keys = keys_of(tile)

        # all warps meet here, so the place's last step is over for all
        plgpu.warp_map(
            lambda warp: Fetcher(warp, stored, parts, buffers).start_any(keys, step, number)
        )

    ends = step + 1 >= steps
    tile = tile + ends.astype(jnp.int32)
    begins = ends & (tile < count)
    steps = jax.lax.cond(begins, lambda: keys_of(tile).steps, lambda: steps)
    return tile, jnp.where(ends, 0, step + 1), steps


def fetch_all(keys_of, stored, count, parts: Sequence[PoolHalf], buffers: int) -> None:
    """The work of the fetching warpgroup for `count` tiles, one after another. Steps go to places
    in turn, as soon as these are free. keys_of: function from i to the `Keys` of the program's i-th
    tile."""

    @plgpu.warp_map
    def _(warp):
        fetcher = Fetcher(warp, stored, parts, buffers)

        def tile(i, before):
            keys = keys_of(i)

            def step(own: bool, j, _):
                fetcher.start(keys, j, before + j, own)
                return 0

            # own keys are under way before the table has been read
            jax.lax.fori_loop(0, keys.own_steps, partial(step, True), 0)
            jax.lax.fori_loop(keys.own_steps, keys.steps, partial(step, False), 0)
            return before + keys.steps

        def last(number, _):
            # a program may not end while a barrier has an arrival that nobody waited for
            fetcher.wait(number)
            return 0

        steps = jax.lax.fori_loop(0, count, tile, 0)
        jax.lax.fori_loop(jnp.maximum(steps - buffers, 0), steps, last, 0)
