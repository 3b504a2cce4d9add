"""Ragged attention on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend.

See `api` for what it computes.

Tiling of the attention. A program serves 64 queries per computing warpgroup of one head of one row.
Keys and values come in steps of `block_k`: own tokens first, then the blocks of the head's table,
as many as make a step. One warpgroup copies a step's pieces into one of `buffers` places in shared
memory while the others compute on those that have arrived; barriers say which places are full and
which are free again. A head's steps end with the last entry that it uses.

Scores are products in the type of `k_new` with float32 sums; exponentials are powers of two,
float32; weights are rounded to the type of `v_new` and go through shared memory into the second
product. Keys outside the valid ranges have the weight 0; their values are set to zero in shared
memory (0 times NaN is NaN), which only steps with a partly valid block need.

Traffic, with b bytes per element, t real tokens and P' slots of the blocks in use: the tiles of a
head run side by side, so that its keys come from the L2 cache after the first: from memory
R N H b (3 t + 2 P') in and R N H b T out. Shared memory: `shared_memory`.

Tiling of the moments. A program serves 64 columns (keys) of one head of one row: the keys are
fetched once, queries in steps of 64 as above; weights are computed again from scores and
log-sum-exp and summed per key in float32.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_operands as mosaic
from pallas_kernels.mosaic_products import LAYOUT, ROWS, Multiply, Products, products
from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.tables import BlockTable

LOG2_E = math.log2(math.e)
PER_ROW, PER_COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)


def attend(
    q, k_new, v_new, new_length, kv_pool, table, kv_scale, *, return_lse, interpret, config=None
):
    """See `api.attend`. config: tiles; None takes those of `config.choose`."""
    mosaic.check(q, kv_pool, kv_scale, interpret)
    config = config or tiles.choose(tiles.Call.of("attend", q, k_new, kv_pool, table), "mosaic")
    chip = products()
    tile = partial(mosaic.tile, swizzle=chip.swizzle)
    (rows, heads, tokens, head_dim), dtype = q.shape, k_new.dtype
    groups, size, buffers = config.warpgroups, config.block_k, config.buffers
    given = [mosaic.padded(a, 2, 8, max(ROWS, size)) for a in (q.astype(dtype), k_new, v_new)]
    stored = Stored.of(kv_pool, kv_scale, table, size)
    count = pl.cdiv(tokens, groups * ROWS)
    lines = count * groups * ROWS  # whole tiles of the statistics: their rows have no padding
    full = partial(plgpu.Barrier, num_arrivals=stored.copies, num_barriers=buffers)
    free = partial(plgpu.Barrier, num_arrivals=groups, num_barriers=buffers)
    out, lse = mosaic.launch(
        partial(_attend_tile, stored, config, chip),
        [jnp.asarray(new_length, jnp.int32).reshape(1), *given, *stored.arrays],
        [
            jax.ShapeDtypeStruct(given[0].shape, v_new.dtype),
            jax.ShapeDtypeStruct((rows, heads, lines), jnp.float32),
        ],
        [
            tile((groups, ROWS, head_dim), dtype),  # queries, in the end the result
            tile((groups, ROWS, size), dtype),  # weights
            plgpu.SMEM((groups, ROWS), jnp.float32),  # statistics
            plgpu.Barrier(num_barriers=groups),  # queries are there
            plgpu.Barrier(num_arrivals=groups),  # invalid values are cleared
            *[tile((buffers, size, head_dim), dtype), full(), free()] * 2,
            *stored.scratch(buffers, head_dim) * 2,
            chip.scratch(groups, size, head_dim),
        ],
        grid={"tile": count, "head": heads, "row": rows},
        computing=groups,
        interpret=interpret,
        name="ragged_attention",
    )
    return (out[:, :, :tokens], lse[:, :, :tokens]) if return_lse else out[:, :, :tokens]


def shared_memory(config: tiles.MosaicConfig, head_dim: int, scaled: bool) -> int:
    """Bytes of shared memory of a program of `attend` in 16 bits, barriers left out. scaled: with
    an int8 pool."""
    groups, size = config.warpgroups, config.block_k
    steps = 2 * config.buffers * size
    tile_numbers = groups * ROWS * (head_dim + size) + steps * head_dim
    return 2 * tile_numbers + groups * ROWS * 4 + scaled * steps * (head_dim + 4)


# --- keys and values ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """The pool and the table of a call as operands. size: keys of a step, which entries of the
    table are filled up to; scaled: whether the pool holds int8."""

    arrays: tuple
    size: int
    block_size: int
    per_row: bool
    scaled: bool

    @classmethod
    def of(cls, kv_pool, kv_scale, table: BlockTable, size: int) -> "Stored":
        block_size = kv_pool.shape[2]
        ids, start, stop = table.with_rows()
        if not kv_pool.shape[1]:  # a kernel has no arrays without elements
            kv_pool = jnp.zeros((len(kv_pool), 1, *kv_pool.shape[2:]), kv_pool.dtype)
            kv_scale = None if kv_scale is None else jnp.zeros((len(kv_pool), 1, 2 * block_size))
        entry = jnp.arange(ids.shape[-1], dtype=jnp.int32)
        used = jnp.where(stop > start, entry + 1, 0).max(-1, initial=0)
        whole = size // block_size
        ids, start, stop = (mosaic.padded(a, 2, whole, whole) for a in (ids, start, stop))
        lines = [] if kv_scale is None else [_scale_lines(kv_scale, ids)]
        arrays = (ids, start, stop, used, kv_pool, *lines)
        return cls(arrays, size, block_size, len(ids) > 1, kv_scale is not None)

    @property
    def pieces(self) -> int:
        """Blocks that make a step."""
        return self.size // self.block_size

    @property
    def copies(self) -> int:
        """That fill a place; own keys, which have no scales, take as many."""
        return self.pieces + self.scaled

    def scratch(self, buffers: int, head_dim: int) -> list:
        """Shared memory for what an int8 pool holds, and for its scales."""
        if not self.scaled:
            return []
        raw = mosaic.tile((buffers, self.size, head_dim), jnp.int8, head_dim)
        return [raw, plgpu.SMEM((buffers, self.size), jnp.float32)]


def _scale_lines(kv_scale, ids):
    """float32 [R, N, 2, P]: scales of keys and of values in table order. Those of a block are too
    few bytes for a copy of their own."""
    rows = jnp.arange(len(kv_scale))[:, None, None]
    both = kv_scale[rows, ids].reshape(len(kv_scale), *ids.shape[1:], 2, -1)
    return jnp.moveaxis(both, 3, 2).reshape(len(kv_scale), ids.shape[1], 2, -1)


@dataclass(frozen=True)
class Part:
    """Keys or values.

    own: those of the scale. half: which of a stored token they are. places: where steps lie in
    shared memory; full, free: barriers that say which of these are. raw, scales: where steps of an
    int8 pool lie before they are converted, and what they are multiplied by.
    """

    own: Any
    half: int
    places: Any
    full: Any
    free: Any
    raw: Any = None
    scales: Any = None


@dataclass(frozen=True)
class Keys:
    """What one head of one row sees, step by step: its own keys, then the stored ones."""

    stored: Stored
    length: Any
    refs: tuple  # `Stored.arrays`
    row: Any
    head: Any

    @property
    def where(self):
        """Of the table."""
        return (self.row if self.stored.per_row else 0, self.head)

    @property
    def own_steps(self):
        return pl.cdiv(self.length, self.stored.size)

    @property
    def steps(self):
        return self.own_steps + pl.cdiv(self.refs[3][self.where], self.stored.pieces)

    def _entry(self, step, piece: int):
        """Of the table; entry 0 stands in for own keys, which have none."""
        return jnp.maximum((step - self.own_steps) * self.stored.pieces + piece, 0)

    def fetch(self, step, place, part: Part) -> None:
        """Start copying a step of keys or values to its place."""
        ids, pool, *scales = self.refs[0], *self.refs[4:]
        size, head_dim = self.stored.block_size, part.places.shape[-1]

        def copy(source, target) -> None:
            plgpu.copy_gmem_to_smem(source, target, part.full.at[place])

        for i in range(self.stored.pieces):
            rows = pl.ds(i * size, size)
            block = ids[(*self.where, self._entry(step, i))]

            @pl.when(step < self.own_steps)
            def _(i=i, rows=rows):
                here = pl.ds(step * self.stored.size + i * size, size)
                copy(part.own.at[self.row, self.head, here], part.places.at[place, rows])

            @pl.when(step >= self.own_steps)
            def _(rows=rows, block=block):
                source = pool.at[self.row, block, :, pl.ds(part.half * head_dim, head_dim)]
                copy(source, (part.raw if scales else part.places).at[place, rows])

        if scales:  # any for own keys: a place takes the same number of copies
            first = jnp.maximum(step - self.own_steps, 0) * self.stored.size
            line = scales[0].at[self.row, self.head, part.half, pl.ds(first, self.stored.size)]
            copy(line, part.scales.at[place])

    def ranges(self, step) -> list[tuple]:
        """(first, last + 1) valid key of every piece of a step, counted within the piece."""
        _, start, stop, *_ = self.refs
        own, size, found = step < self.own_steps, self.stored.block_size, []
        for i in range(self.stored.pieces):
            where = (*self.where, self._entry(step, i))
            left = jnp.clip(self.length - step * self.stored.size - i * size, 0, size)
            found.append((jnp.where(own, 0, start[where]), jnp.where(own, left, stop[where])))
        return found

    def is_partial(self, ranges):
        """Whether any key of a step is invalid."""
        return (
            sum(jnp.where(stop - start < self.stored.block_size, 1, 0) for start, stop in ranges)
            > 0
        )

    def valid(self, ranges, shape: tuple[int, ...], axis: int, layout=LAYOUT):
        """Mask of an array whose `axis` runs over the keys of a step."""
        key = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
        inside = None
        for i, (start, stop) in enumerate(ranges):
            first = i * self.stored.block_size
            here = (key >= first + start) & (key < first + stop)
            inside = here if inside is None else inside | here
        return inside

    def scales(self, part: Part, step, place, ranges, layout):
        """What the scores or weights of a step's keys are multiplied by; zero where a key is not
        valid, whose scale may be NaN."""
        found = mosaic.load(part.scales.at[place], layout)
        found = jnp.where(step < self.own_steps, jnp.ones_like(found), found)
        return jnp.where(self.valid(ranges, found.shape, 0, layout), found, jnp.zeros_like(found))


def _fetch_all(keys: Keys, parts, buffers: int) -> None:
    """What the fetching warpgroup does: steps go to places in turn, as soon as they are free."""
    plgpu.set_max_registers(mosaic.MEMORY_REGISTERS, action="decrease")

    def step(i, _):
        place = jax.lax.rem(i, buffers)

        @pl.when(i >= buffers)
        def _():
            for part in parts:
                plgpu.barrier_wait(part.free.at[place])

        for part in parts:
            keys.fetch(i, place, part)
        return 0

    def last(i, _):
        # no barrier may be left with an arrival that nobody has seen
        for part in parts:
            plgpu.barrier_wait(part.free.at[jax.lax.rem(i, buffers)])
        return 0

    jax.lax.fori_loop(0, keys.steps, step, 0)
    jax.lax.fori_loop(jnp.maximum(keys.steps - buffers, 0), keys.steps, last, 0)


# --- attention ------------------------------------------------------------------------------------


def _attend_tile(stored: Stored, config, chip: Products, length_ref, q_ref, k_ref, v_ref, *refs):
    given = len(stored.arrays)
    table, (out_ref, lse_ref, q_tile, p_tile, lse_tile, ready, changed) = (
        refs[:given],
        refs[given : given + 7],
    )
    places, (*raw, sums) = refs[given + 7 : given + 13], refs[given + 13 :]
    row, head, group = (jax.lax.axis_index(n) for n in ("row", "head", "warpgroup"))
    keys = Keys(stored, length_ref[0], tuple(table), row, head)
    parts = (
        Part(k_ref, 0, *places[:3], *raw[: len(raw) // 2]),
        Part(v_ref, 1, *places[3:], *raw[len(raw) // 2 :]),
    )
    first = (jax.lax.axis_index("tile") * config.warpgroups + group) * ROWS
    here = pl.ds(first, ROWS)

    @pl.when(group == config.warpgroups)
    def _():
        _fetch_all(keys, parts, config.buffers)

    @pl.when(group < config.warpgroups)
    def _():
        plgpu.set_max_registers(mosaic.COMPUTE_REGISTERS, action="increase")
        plgpu.copy_gmem_to_smem(q_ref.at[row, head, here], q_tile.at[group], ready.at[group])
        plgpu.barrier_wait(ready.at[group])
        multiply = chip.multiply(sums, group)
        tile = _Tile(q_tile.at[group], p_tile.at[group], multiply, changed, group, config)
        out, lse = tile.see(keys, parts)
        q_tile[group] = out.astype(q_tile.dtype)  # the queries are not needed any more
        lse_tile[group] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile.at[group], out_ref.at[row, head, here])
        plgpu.copy_smem_to_gmem(lse_tile.at[group], lse_ref.at[row, head, here])
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Tile:
    """64 queries of a warpgroup, in shared memory, with room for their weights."""

    queries: Any
    weights: Any
    multiply: Multiply
    changed: Any  # a barrier: the first warpgroup has changed keys or values
    group: Any
    config: Any

    def see(self, keys: Keys, parts) -> tuple:
        """(weighted mean of the values [64, H], log-sum-exp [64]) over all keys."""
        head_dim = self.queries.shape[-1]
        carry = (
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), LAYOUT),
        )
        step = partial(self._step, keys, *parts)
        # every query sees at least the scale's first token: the maximum is finite after step 0
        maximum, total, out = jax.lax.fori_loop(0, keys.steps, step, carry)
        return out / _across(total, out.shape), maximum / LOG2_E + jnp.log(total)

    def _step(self, keys: Keys, k: Part, v: Part, i, carry):
        """Online softmax; the maximum is in units of log2."""
        (maximum, total, out), place = carry, jax.lax.rem(i, self.config.buffers)
        ranges = keys.ranges(i)
        partly = keys.is_partial(ranges)
        plgpu.barrier_wait(k.full.at[place])
        self._convert(keys, i, k, place)
        shape = (ROWS, keys.stored.size)
        scores = self.multiply(self.queries, _turned(k.places.at[place]), shape)
        if k.raw is not None:  # one scale per key, so it may leave the sum over H
            scores *= _down(keys.scales(k, i, place, ranges, PER_COLUMN), scores.shape)
        _release(k, place)
        # after the product, so that keys that are not valid may hold anything
        scores = jax.lax.cond(
            partly,
            lambda s: jnp.where(keys.valid(ranges, s.shape, 1), s, -jnp.inf),
            lambda s: s,
            scores,
        )
        highest = jnp.maximum(maximum, scores.max(axis=1) * LOG2_E)
        rescale = jnp.exp2(maximum - highest)
        weights = jnp.exp2(scores * LOG2_E - _across(highest, scores.shape))
        total = total * rescale + weights.sum(axis=1)
        plgpu.barrier_wait(v.full.at[place])
        if v.raw is not None:  # after the total, which sums the weights alone
            weights *= _down(keys.scales(v, i, place, ranges, PER_COLUMN), weights.shape)
        self.weights[...] = weights.astype(self.weights.dtype)
        plgpu.commit_smem()
        self._convert(keys, i, v, place)
        # what an int8 pool holds is finite, whatever it is
        unclean = partly if v.raw is None else partly & (i < keys.own_steps)
        pl.when(unclean)(lambda: self._clear(keys, ranges, v.places.at[place]))
        new = self.multiply(self.weights, v.places.at[place], out.shape)
        _release(v, place)
        return highest, total, out * _across(rescale, out.shape) + new

    def _convert(self, keys: Keys, i, part: Part, place) -> None:
        """A stored step of an int8 pool, without its scales, in the type of the own keys."""
        if part.raw is None:
            return

        @pl.when(i >= keys.own_steps)
        def _():
            @pl.when(self.group == 0)
            def _():
                whole = mosaic.load(part.raw.at[place], LAYOUT)
                part.places[place] = whole.astype(part.places.dtype)
                plgpu.commit_smem()

            self._wait_for_change()

    def _clear(self, keys: Keys, ranges, values) -> None:
        """Zeros in place of values that are not valid."""

        @pl.when(self.group == 0)
        def _():
            found = values[...]
            inside = keys.valid(ranges, found.shape, 0)
            values[...] = jnp.where(inside, found, jnp.zeros_like(found))
            plgpu.commit_smem()

        self._wait_for_change()

    def _wait_for_change(self) -> None:
        if self.config.warpgroups > 1:
            plgpu.barrier_arrive(self.changed)
            plgpu.barrier_wait(self.changed)


def _release(part: Part, place) -> None:
    """The place may be filled again."""
    if part.raw is not None:
        plgpu.commit_smem()  # ordinary loads and the copies that follow take different ways
    plgpu.barrier_arrive(part.free.at[place])


def _turned(ref):
    """A view [columns, rows] of a tile."""
    return ref.transpose((1, 0))


def _across(rows, shape):
    """A number per row for every column."""
    return jax.lax.broadcast_in_dim(rows, shape, [0])


# --- sums over queries ----------------------------------------------------------------------------


def attention_moments(
    q, k_new, new_length, kv_pool, table, weights, lse, kv_scale, *, squares, interpret, config=None
):
    """See `api.attention_moments`. config: tiles; None takes those of `config.choose`."""
    mosaic.check(q, kv_pool, kv_scale, interpret)
    call = tiles.Call.of("attention_moments", q, k_new, kv_pool, table)
    buffers = (config or tiles.choose(call, "mosaic")).buffers
    chip = products()
    tile = partial(mosaic.tile, swizzle=chip.swizzle)
    (rows, heads, queries, head_dim), dtype = q.shape, k_new.dtype
    # 64 keys are the rows of a product, and each program sums its columns over all queries by
    # itself: no two programs add to one number
    stored, own = Stored.of(kv_pool, kv_scale, table, ROWS), k_new.shape[2]
    weights = weights.astype(jnp.float32)
    last = jnp.where(weights != 0, jnp.arange(queries, dtype=jnp.int32) + 1, 0).max(initial=0)
    old = pl.cdiv(call.slots, ROWS)
    count = old + pl.cdiv(own, ROWS)
    found = mosaic.launch(
        partial(_sum_columns, stored, buffers, chip, old),
        [
            jnp.stack([jnp.asarray(new_length, jnp.int32), last]),
            mosaic.padded(q.astype(dtype), 2, ROWS),
            mosaic.padded(weights, 0, ROWS),
            mosaic.padded(lse, 2, ROWS),
            mosaic.padded(k_new, 2, 8, ROWS),
            *stored.arrays,
        ],
        [jax.ShapeDtypeStruct((rows, heads, count * ROWS), jnp.float32)] * (1 + squares),
        [
            plgpu.SMEM((1 + squares, ROWS), jnp.float32),  # sums
            tile((1, ROWS, head_dim), dtype),  # keys
            plgpu.Barrier(num_arrivals=stored.copies, num_barriers=1),
            *stored.scratch(1, head_dim),
            chip.scratch(1, ROWS),
            tile((buffers, ROWS, head_dim), dtype),  # queries
            plgpu.SMEM((buffers, 2, ROWS), jnp.float32),  # their weights and log-sum-exp
            plgpu.Barrier(num_arrivals=3, num_barriers=buffers),
            plgpu.Barrier(num_barriers=buffers),
        ],
        grid={"tile": count, "head": heads, "row": rows},
        computing=1,
        interpret=interpret,
        name="attention_moments",
    )
    # whole tiles of both kinds of columns: cut to the slots of the table and the own tokens
    columns = [slice(0, call.slots), slice(old * ROWS, old * ROWS + own)]
    sums = [jnp.concatenate([a[:, :, part] for part in columns], axis=-1) for a in found]
    return sums[0], sums[1] if squares else None


def _sum_columns(stored: Stored, buffers: int, chip: Products, old: int, numbers_ref, *refs):
    """One step of keys; steps of own keys come after the `old` ones of the table.

    No number of registers is asked for: as many as are needed leave room for three programs on a
    multiprocessor.
    """
    *given, k_ref = refs[:4]
    inputs = 4 + len(stored.arrays)
    table, queries = refs[4:inputs], refs[-4:]
    powers = len(refs) - inputs - 8 - 2 * stored.scaled
    results, (sums, k_tile, arrived, *raw, product_sums) = (
        refs[inputs : inputs + powers],
        refs[inputs + powers : -4],
    )
    part = Part(k_ref, 0, k_tile, arrived, None, *raw)
    row, head, tile = (jax.lax.axis_index(name) for name in ("row", "head", "tile"))
    keys = Keys(stored, numbers_ref[0], tuple(table), row, head)
    step = jnp.where(tile < old, keys.own_steps + tile, tile - old)
    # no key is in a step behind the last one of its kind: nothing is fetched, the sums are 0
    there = jnp.where(tile < old, step < keys.steps, step < keys.own_steps)
    seen = Queries(*given, *queries, jnp.where(there, pl.cdiv(numbers_ref[1], ROWS), 0), buffers)

    @pl.when((jax.lax.axis_index("warpgroup") == 1) & (seen.count > 0))
    def _():
        keys.fetch(step, 0, part)
        seen.fetch_all(row, head)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def _():
        pl.when(seen.count > 0)(lambda: plgpu.barrier_wait(arrived.at[0]))
        ranges = keys.ranges(step)
        factor = None
        if stored.scaled:
            factor = keys.scales(part, step, 0, ranges, PER_ROW)

            @pl.when((seen.count > 0) & (step >= keys.own_steps))
            def _():
                part.places[0] = mosaic.load(part.raw.at[0], LAYOUT).astype(part.places.dtype)
                plgpu.commit_smem()

        inside = keys.valid(ranges, (ROWS, ROWS), 0)
        multiply = chip.multiply(product_sums, 0)
        for i, total in enumerate(seen.sums(multiply, k_tile.at[0], factor, inside, powers)):
            sums[i] = total
        plgpu.commit_smem()
        for i, result in enumerate(results):
            columns = pl.ds(tile * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(sums.at[i], result.at[row, head, columns])
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class Queries:
    """Queries of a head [Q, H], their weights [Q] and log-sum-exp [Q], fetched 64 at a time.

    tile, lines: places in shared memory. count: steps up to the last query that has a weight.
    """

    q_ref: Any
    weight_ref: Any
    lse_ref: Any
    tile: Any
    lines: Any
    full: Any
    free: Any
    count: Any
    buffers: int

    def fetch_all(self, row, head) -> None:
        def step(i, _):
            place, here = jax.lax.rem(i, self.buffers), pl.ds(i * ROWS, ROWS)
            pl.when(i >= self.buffers)(lambda: plgpu.barrier_wait(self.free.at[place]))
            for source, target in (
                (self.q_ref.at[row, head, here], self.tile.at[place]),
                (self.weight_ref.at[here], self.lines.at[place, 0]),
                (self.lse_ref.at[row, head, here], self.lines.at[place, 1]),
            ):
                plgpu.copy_gmem_to_smem(source, target, self.full.at[place])
            return 0

        def last(i, _):
            plgpu.barrier_wait(self.free.at[jax.lax.rem(i, self.buffers)])
            return 0

        jax.lax.fori_loop(0, self.count, step, 0)
        jax.lax.fori_loop(jnp.maximum(self.count - self.buffers, 0), self.count, last, 0)

    def sums(self, multiply: Multiply, keys, factor, inside, powers: int) -> tuple:
        """Weights of the keys [64, H] summed over all queries, and their squares if powers is 2;
        zero where a key is not `inside`. factor: [64], of the scores, or None."""

        def line(place, which: int):
            return mosaic.load(self.lines.at[place, which], PER_COLUMN)

        def step(i, carry):
            place = jax.lax.rem(i, self.buffers)
            plgpu.barrier_wait(self.full.at[place])
            scores = multiply(keys, _turned(self.tile.at[place]), (ROWS, ROWS))
            if factor is not None:
                scores *= _across(factor, scores.shape)
            weight, lse = (_down(line(place, which), scores.shape) for which in (0, 1))
            plgpu.commit_smem()  # ordinary loads and the copies that follow take different ways
            plgpu.barrier_arrive(self.free.at[place])
            p = jnp.exp2((scores - lse) * LOG2_E)
            # queries without a weight (padding) and keys without a place may be NaN
            p = jnp.where(inside & (weight != 0), p, 0.0)
            terms = (p * weight, p * p * weight)[:powers]
            return tuple(a + b.sum(axis=1) for a, b in zip(carry, terms, strict=True))

        zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW)
        return jax.lax.fori_loop(0, self.count, step, (zeros,) * powers)


def _down(columns, shape):
    """A number per column for every row."""
    return jax.lax.broadcast_in_dim(columns, shape, [1])
