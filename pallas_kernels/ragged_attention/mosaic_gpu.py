"""Ragged attention on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend.

See `api` for what it computes; `mosaic_projection` for queries, `mosaic_keys` for keys and values.

Tiling. A tile has 64 queries per computing warpgroup, of one head of one row. Keys and values come
in steps of `block_k`: own tokens first, then the blocks of the head's table, as many as make a
step. A head's steps end with the last entry that it uses. A program goes through several tiles
(`Shares`). Of three or four warpgroups one copies the blocks of a step into one of `buffers` places
in shared memory while the others compute on steps that have arrived. Barriers say which places are
full and which are free again. A program of few queries is a single warpgroup: it starts the copies
of as many steps as there are places, then computes, and fills a place again after its step. Three
such programs share a multiprocessor, and compute while others wait.

Scores are products in the type of the projection with float32 sums. Exponentials are float32
powers of two. Weights are rounded and go into the second product, which adds to the sums of the
steps before: from registers on Hopper, through shared memory on Blackwell. Keys outside the valid
ranges have the weight 0. Unless all numbers are finite (`BlockTable.finite`), their values are set
to zero in shared memory, because 0 times NaN is NaN; only steps with a partly valid block need
that, and the table has a bit per entry that says which.

Traffic, with b bytes per element, t real tokens and P' slots of the blocks in use. The tiles of a
head follow one another, so all but the first find its keys in the L2 cache. From memory come
R N H b (T + 2 t + 2 P') bytes, R N H b T go out, and `finished` moves what it says.
`shared_memory` counts shared memory. A single query takes a tile of 64. That is 64 operations per
byte of bfloat16 keys, a third of what tensor cores do while memory delivers the byte, so the
padding costs no time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import estimates
from pallas_kernels.cache_write import mosaic_gpu as cache_write
from pallas_kernels.projection import K, Q, V
from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.ragged_attention.mosaic_keys import (
    Keys,
    PoolHalf,
    StoredBlocks,
    fetch_all,
    fetch_next,
)
from pallas_kernels.ragged_attention.mosaic_moments import attention_moments
from pallas_kernels.ragged_attention.reference import in_turn
from pallas_kernels.refs import Ref, Scalar, one_number
from pallas_kernels.shared import mosaic_operands as mosaic
from pallas_kernels.shared.mosaic_products import (
    LAYOUT,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    Add,
    Multiply,
    Wgmma,
    across,
    down,
    products,
)
from pallas_kernels.shared.mosaic_projection import (
    TURNED,
    TileMemory,
    Unfinished,
    finished,
    finished_and_stored,
    turn_scratch,
    turn_widths,
)

__all__ = ["attend", "attention_moments", "store_and_attend"]

LOG2_E = math.log2(math.e)
# Programs of one warpgroup that a multiprocessor holds, without and with a rotation: so many have
# 168 and 255 registers per thread.
ALONE = (3, 2)


@dataclass(frozen=True)
class Shares:
    """The tiles of all heads of all rows, in the order in which programs serve them.

    Where there are more tiles than the chip can serve at once, a program stays on its
    multiprocessor and goes through several, one after another: the next tile's queries and keys are
    fetched while the last one's are in use. Tiles of a head follow one another, so its keys are in
    the L2 cache when they are read again.

    tiles, heads: of a head, of a row.
    total: tiles in all.
    programs: how many there are. Each has equally many tiles, or one more.
    """

    tiles: int
    heads: int
    total: int
    programs: int

    @classmethod
    def of(cls, projection, config: tiles.MosaicConfig, chip: Wgmma, scaled: bool):
        """scaled: whether the pool is int8."""
        rows, heads, tokens, head_dim = projection.shape
        groups, size, turned = config.warpgroups, config.block_k, projection.rotation is not None
        of_head = -(-tokens // (groups * ROWS))
        total = rows * heads * of_head
        # bytes of shared memory of a program, without barriers: queries as they come and finished,
        # weights, the matrix of the rotation, steps; two for each number
        queries, steps = groups * ROWS * head_dim, 2 * config.buffers * size
        weights = 0 if chip.registers else groups * ROWS * size
        numbers = 2 * queries + weights + turned * TURNED**2 + steps * head_dim
        memory = 2 * numbers + groups * ROWS * 4 + scaled * steps * (head_dim + 4)
        # two or three warpgroups that compute take all registers of a multiprocessor
        most = ALONE[turned] if groups == 1 else 1
        at_once = mosaic.programs_at_once(memory, most)
        memory += 2 * queries  # with a place for the result
        fits = memory <= mosaic.MOST and mosaic.programs_at_once(memory, most) == at_once
        return cls(of_head, heads, total, min(total, at_once) if fits else total)

    @property
    def several(self) -> bool:
        """Whether programs serve more than one tile. A tile's result then has a place of its own in
        shared memory, so that the next one's queries may come while it is copied out."""
        return self.total > self.programs

    def of_program(self, program) -> tuple:
        """(first tile, number of tiles) of a program."""
        if not self.several:
            return program, 1
        first, last = ((program + i) * self.total // self.programs for i in (0, 1))
        return first, last - first

    def place(self, number) -> tuple:
        """(row, head, tile of the head) of a tile."""
        head = jax.lax.div(number, self.tiles)
        place = jax.lax.div(head, self.heads), jax.lax.rem(head, self.heads)
        return *place, jax.lax.rem(number, self.tiles)


def attend(
    projection,
    new_length,
    kv_pool,
    table,
    kv_scale,
    *,
    return_lse,
    interpret,
    config=None,
    own=None,
    listed=False,
):
    """See `api.attend`. A projection of queries alone, with the length 0, sees stored slots only;
    every row then needs at least one.

    config: tiles; None takes those of `config.choose`.
    own: finished keys and values of the scale; None: they are finished first.
    listed: whether these are among the stored slots. The queries then count as if alone.
    """
    mosaic.check(projection.qkv, kv_pool, kv_scale, interpret)
    if alone := listed or projection.qkv.shape[2] == 1:  # an array that nobody reads
        own = kv_pool.reshape(len(kv_pool), -1, kv_pool.shape[-1])
    elif own is None:
        own = finished(projection, (K, V), interpret)
    config = config or tiles.choose(tiles.Call.of("attend", projection, kv_pool, table), "mosaic")
    chip = replace(products(), registers=False) if interpret else products()
    given = projection, new_length, kv_pool, table, kv_scale, own
    return _attend(given, config, chip, alone, return_lse, interpret)


# traced and lowered once for layers whose bodies differ elsewhere
@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _attend(given, config: tiles.MosaicConfig, chip: Wgmma, alone: bool, return_lse, interpret):
    projection, new_length, kv_pool, table, kv_scale, own = given
    (rows, heads, tokens, head_dim), groups = projection.shape, config.warpgroups
    # Scales of rows behind the last one may be NaN, and so may what is finished with them. From
    # behind an array's end chips copy zeros, and JAX's simulator NaN.
    behind = interpret and own.shape[1] % config.block_k
    own_finite = table.finite and projection.row_scale is None and not behind
    stored = StoredBlocks.of(kv_pool, kv_scale, table, config.block_k, own_finite)
    shares = Shares.of(projection, config, chip, stored.scaled)
    lines = shares.tiles * groups * ROWS  # statistics are written in whole tiles
    [(out, lse)] = mosaic.launch(
        partial(_attend_tiles, config, chip, shares),
        [one_number(new_length), Unfinished.of(projection, (Q,), lines), own, stored],
        [
            (
                jax.ShapeDtypeStruct((rows, tokens, heads * head_dim), projection.dtype),
                jax.ShapeDtypeStruct((rows, heads, lines), jnp.float32),
            )
        ],
        _scratch(projection, config, chip, shares, stored),
        computing=groups if groups > 1 else 0,  # a single warpgroup fetches as well
        grid={"program": shares.programs},
        cost=estimates.attend(projection, kv_pool, table, lse=True, own=not alone),
        interpret=interpret,
        name="ragged_attention",
    )
    out = out.reshape(rows, tokens, heads, head_dim)
    return (out, lse[:, :, :tokens]) if return_lse else out


def store_and_attend(
    projection, new_length, kv_pool, table, writes, kv_scale, following=None, *, interpret
):
    """See `api.store_and_attend`. Keys and values are stored by the kernel that finishes them, as
    far as its copies can: they do not convert numbers, and want a table for all rows. Attention
    reads them where they are stored, if all of them are: they are written once, and share blocks
    and steps with older ones."""
    mosaic.check(projection.qkv, kv_pool, kv_scale, interpret)
    per_row = writes.ids.ndim == 3 and writes.layer is None
    if kv_pool.dtype != projection.dtype or writes.by_token is None or per_row or not kv_pool.size:
        given = (projection, new_length, kv_pool, table, writes, kv_scale)
        return in_turn(attend, cache_write.write)(*given, interpret=interpret)
    listed = following is not None
    given = projection, kv_pool, writes, products(), interpret, not listed
    own, kv_pool = finished_and_stored(*given)
    seen = (0, kv_pool, following) if listed else (new_length, kv_pool, table)
    how = dict(return_lse=False, interpret=interpret, own=own, listed=listed)
    return attend(projection, *seen, kv_scale, **how), kv_pool, kv_scale


def _scratch(projection, config, chip: Wgmma, shares: Shares, stored: StoredBlocks) -> list:
    """Shared and tensor memory of a program, in the order of `_attend_tiles`."""
    (_, _, tokens, head_dim), dtype = projection.shape, projection.dtype
    groups, size, buffers = config.warpgroups, config.block_k, config.buffers
    tile = partial(mosaic.tile, dtype=dtype, swizzle=chip.swizzle)
    landing = mosaic.landing(tokens, (groups, ROWS, head_dim), dtype, chip.swizzle)
    full = plgpu.Barrier(num_arrivals=stored.copies, num_barriers=buffers)
    free = plgpu.Barrier(num_arrivals=groups, num_barriers=buffers) if groups > 1 else None
    return [
        # queries as they come, queries finished, a barrier that says that they are there
        [landing, tile((groups, ROWS, head_dim)), plgpu.Barrier(num_barriers=groups)],
        turn_scratch(projection, chip),
        # a place for the result where other queries follow; statistics
        [landing] if shares.several else [],
        plgpu.SMEM((groups, ROWS), jnp.float32),
        [] if chip.registers else [tile((groups, ROWS, size))],  # weights
        plgpu.Barrier(num_arrivals=groups),  # invalid values are cleared
        [[tile((buffers, size, head_dim)), full, free, *stored.scratch(buffers, head_dim)]] * 2,
        chip.scratch(groups, size, head_dim, *turn_widths(projection)),
    ]


def _attend_tiles(
    config, chip: Wgmma, shares: Shares, length, given, own, stored, out_refs, *scratch
):
    (raw, queries, arrived), turn, results, statistics, weights, changed, parts, sums = scratch
    group = jax.lax.axis_index("warpgroup")
    begin, count = shares.of_program(jax.lax.axis_index("program"))
    parts = [PoolHalf(half, *refs) for half, refs in enumerate(parts)]
    numbers = length[0], stored.layer[0]

    def keys_of(i) -> Keys:
        row, head, _ = shares.place(begin + i)
        return Keys.of(stored, own, numbers, row, head, given.heads)

    def compute(fetch: Callable | None) -> None:
        """Go through the program's tiles. fetch: `fetch_next`; None: another warpgroup fetches."""
        multiply = chip.multiply(sums, group)
        places = raw.at[group], queries.at[group], queries.at[group], arrived.at[group]
        work = TileMemory(*places, turn, multiply)
        add = chip.add(multiply, weights, group)
        tile = _Tile(work.tile, multiply, add, changed, group, config, parts, fetch)
        # raw queries are not needed once they are finished: the result may take their place
        memory, offset = ((results or [raw])[0].at[group], statistics.at[group]), group * ROWS

        def place(i) -> tuple:
            """(row, head, first query) of the program's i-th tile."""
            row, head, number = shares.place(begin + i)
            return row, head, number * (config.warpgroups * ROWS) + offset

        def serve(i, carry):
            row, head, first = place(i)
            given.finish(Q, row, head, first, work)
            if shares.several:
                pl.when(i + 1 < count)(lambda: given.start(Q, *place(i + 1), work))
            found, carry = tile.see(keys_of(i), carry)
            _put(found, memory, out_refs, row, head, first)
            return carry

        @pl.when(group == 0)
        def _():
            if given.turn is not None:
                plgpu.copy_gmem_to_smem(given.turn, *turn)

        given.start(Q, *place(0), work)
        following = ()
        if fetch:  # the first steps
            following = jnp.int32(0), jnp.int32(0), keys_of(0).steps
            following = jax.lax.fori_loop(0, config.buffers, fetch, following)
        if given.turn is not None:
            plgpu.barrier_wait(turn[1])
        jax.lax.fori_loop(0, count, serve, (jnp.int32(0), following))
        # What a program has stored is there when all have ended.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    if config.warpgroups == 1:
        compute(partial(fetch_next, keys_of, stored, count, parts, config.buffers))
        return

    @pl.when(group == config.warpgroups)
    def _():
        plgpu.set_max_registers(mosaic.MEMORY_REGISTERS, action="decrease")
        fetch_all(keys_of, stored, count, parts, config.buffers)

    @pl.when(group < config.warpgroups)
    def _():
        # takes over what the fetching warpgroup has given back
        plgpu.set_max_registers(mosaic.COMPUTE_REGISTERS[config.warpgroups], action="increase")
        compute(None)


def _put(found, memory, refs, row, head, first) -> None:
    """Start copying a head's mean of the values [64, H] and log-sum-exp [64], of queries from
    `first` on, through their places in shared memory to the arrays of results."""
    (out, lse), (place, line), (out_ref, lse_ref) = found, memory, refs
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copies of the tile before
    mosaic.store(place, out.astype(place.dtype), mosaic.lands_plain(out_ref.shape[1]))
    line[...] = lse
    plgpu.commit_smem()
    here, head_dim = pl.ds(first, ROWS), out.shape[1]
    columns = pl.ds(head * head_dim, head_dim)
    plgpu.copy_smem_to_gmem(place, out_ref.at[row, here, columns])
    plgpu.copy_smem_to_gmem(line, lse_ref.at[row, head, here])


@dataclass(frozen=True)
class _Tile:
    """The 64 queries of a warpgroup in shared memory."""

    queries: Ref
    multiply: Multiply
    add: Add
    changed: Ref  # a barrier: the first warpgroup has changed keys or values
    group: Scalar
    config: tiles.MosaicConfig
    parts: Sequence[PoolHalf]
    fetch: Callable | None  # `fetch_next`; None: another warpgroup fetches

    def see(self, keys: Keys, carry: tuple) -> tuple:
        """((weighted mean of the values [64, H], log-sum-exp [64]) over all keys, carry).

        carry: how many steps the program has made for tiles before this one, and what is to be
          copied next.
        """
        head_dim, (before, following) = self.queries.shape[-1], carry
        # a loop keeps the layouts of what it carries, so they are named before it
        state = (
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), LAYOUT),
        )

        def step(i, state):
            state, following = self._step(keys, before + i, i, state[0]), state[1]
            if self.fetch:  # nobody reads the step's place any more
                following = self.fetch(before + i + self.config.buffers, following)
            return state, following

        # every query sees at least the scale's first token: the maximum is finite after step 0
        state, following = jax.lax.fori_loop(0, keys.steps, step, (state, following))
        maximum, total, out = state
        found = out / across(total, out.shape), maximum / LOG2_E + jnp.log(total)
        return found, (before + keys.steps, following)

    def _step(self, keys: Keys, number, i, state):
        """One step of the online softmax. number: of the step, in the program. The maximum is in
        units of log2."""
        (maximum, total, out), (k, v) = state, self.parts
        place = jax.lax.rem(number, self.config.buffers)
        partly = keys.is_partial(i)
        plgpu.barrier_wait(k.full.at[place])
        self._convert(keys, i, k, place)
        shape = (ROWS, keys.stored.size)
        scores = self.multiply(self.queries, k.places.at[place].transpose((1, 0)), shape)
        if k.raw is not None:  # one scale per key, so it may leave the sum over H
            scores *= down(keys.scales(k, i, place, PER_COLUMN), scores.shape)
        k.release(place)  # the next keys may come while the softmax is at work
        # after the product, so that keys that are not valid may hold anything
        scores = jax.lax.cond(
            partly, lambda s: jnp.where(keys.valid(i, s.shape, 1), s, -jnp.inf), lambda s: s, scores
        )
        highest = jnp.maximum(maximum, scores.max(axis=1) * LOG2_E)
        rescale = jnp.exp2(maximum - highest)  # 0 in the first step, whose maximum was -inf
        weights = jnp.exp2(scores * LOG2_E - across(highest, scores.shape))
        total, out = total * rescale + weights.sum(axis=1), out * across(rescale, out.shape)
        plgpu.barrier_wait(v.full.at[place])
        if v.raw is not None:  # after the total, which sums the weights alone
            scales = down(keys.scales(v, i, place, PER_COLUMN), weights.shape)
            weights = jnp.where(weights > 0, weights * scales, 0.0)
        self._convert(keys, i, v, place)
        if not all(keys.stored.finite):
            unclean = partly & (i < keys.own_steps) if keys.stored.finite[0] else partly
            pl.when(unclean)(lambda: self._change(lambda: _clear(keys, i, v.places.at[place])))
        out = self.add(out, weights.astype(self.queries.dtype), v.places.at[place])
        v.release(place)
        return highest, total, out

    def _convert(self, keys: Keys, i, part: PoolHalf, place) -> None:
        """Convert a stored step of an int8 pool to the type of the own keys, without its scales."""

        def convert() -> None:
            whole = mosaic.load(part.raw.at[place], LAYOUT)
            part.places[place] = whole.astype(part.places.dtype)

        if part.raw is not None:
            pl.when(i >= keys.own_steps)(lambda: self._change(convert))

    def _change(self, change: Callable) -> None:
        """Let one warpgroup change what all of them share, and wait for it."""

        @pl.when(self.group == 0)
        def _():
            change()
            plgpu.commit_smem()

        # a single warpgroup sees its own stores after `commit_smem`
        if self.config.warpgroups > 1:
            plgpu.barrier_arrive(self.changed)
            plgpu.barrier_wait(self.changed)


def _clear(keys: Keys, i, values) -> None:
    """Write zeros in place of values that are not valid."""
    found = values[...]
    inside = keys.valid(i, found.shape, 0)
    values[...] = jnp.where(inside, found, jnp.zeros_like(found))
