"""Ragged attention on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend.

See `api` for what it computes; `mosaic_projection` for queries, `mosaic_keys` for keys and values.

Tiling. A program serves 64 queries per computing warpgroup, of one head of one row. Keys and values
come in steps of `block_k`: own tokens first, then the blocks of the head's table, as many as make a
step. One warpgroup copies the blocks of a step into one of `buffers` places in shared memory while
the others compute on steps that have arrived. Barriers say which places are full and which are free
again. A head's steps end with the last entry that it uses. Where one tile holds all queries of a
head and there are many heads, a program serves several heads one after another: the next head's
keys and queries are fetched while the last head's are in use.

Scores are products in the type of the projection with float32 sums. Exponentials are float32 powers
of two. Weights are rounded and go into the second product, which adds to the sums of the steps
before: from registers on Hopper, through shared memory on Blackwell. Keys outside the valid ranges
have the weight 0. Their values are set to zero in shared memory, because 0 times NaN is NaN; only
steps with a partly valid block need that, and the table has a bit per entry that says which.

Traffic, with b bytes per element, t real tokens and P' slots of the blocks in use. The tiles of a
head run side by side, so all but the first find its keys in the L2 cache. From memory come R N H b
(T + 2 t + 2 P') bytes, R N H b T go out, and `finished` moves what it says. `shared_memory` counts
shared memory. A single query takes a tile of 64. That is 64 operations per byte of bfloat16 keys, a
third of what tensor cores do while memory delivers the byte, so the padding costs no time.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import estimates
from pallas_kernels import mosaic_operands as mosaic
from pallas_kernels.mosaic_products import (
    LAYOUT,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    Add,
    Multiply,
    Products,
    across,
    down,
    products,
    turned,
)
from pallas_kernels.mosaic_projection import (
    TURNED,
    TileMemory,
    Unfinished,
    finished,
    turn_scratch,
    turn_widths,
)
from pallas_kernels.projection import K, Q, V
from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.ragged_attention.mosaic_keys import Keys, Part, StoredBlocks, fetch_all
from pallas_kernels.ragged_attention.mosaic_moments import attention_moments
from pallas_kernels.refs import Ref, Scalar

__all__ = ["attend", "attention_moments", "shared_memory"]

LOG2_E = math.log2(math.e)
# One program serves several heads only if this many programs are left: about four for each
# multiprocessor.
PROGRAMS = 512


def attend(projection, new_length, kv_pool, table, kv_scale, *, return_lse, interpret, config=None):
    """See `api.attend`. config: tiles; None takes those of `config.choose`. A projection of queries
    alone, with the length 0, sees stored slots only; every row then needs at least one."""
    mosaic.check(projection.qkv, kv_pool, kv_scale, interpret)
    config = config or tiles.choose(tiles.Call.of("attend", projection, kv_pool, table), "mosaic")
    (rows, heads, tokens, head_dim), groups = projection.shape, config.warpgroups
    chip = products().simulated() if interpret else products()
    stored = StoredBlocks.of(kv_pool, kv_scale, table, config.block_k)
    count = pl.cdiv(tokens, groups * ROWS)
    several = heads_of_a_program(rows, heads) if groups == 1 and tokens <= ROWS else 1
    lines = count * groups * ROWS  # statistics are written in whole tiles
    [(out, lse)] = mosaic.launch(
        partial(_attend_tile, config, chip, several),
        [
            mosaic.number(new_length),
            Unfinished.of(projection, (Q,), lines),
            _own_keys(projection, kv_pool, interpret),
            stored,
        ],
        [
            (
                jax.ShapeDtypeStruct((rows, tokens, heads * head_dim), projection.dtype),
                jax.ShapeDtypeStruct((rows, heads, lines), jnp.float32),
            )
        ],
        _scratch(projection, config, chip, several, stored),
        mesh=mosaic.programs(computing=groups, tile=count, head=heads // several, row=rows),
        cost=estimates.attend(projection, kv_pool, table, lse=True),
        interpret=interpret,
        name="ragged_attention",
    )
    out = out.reshape(rows, tokens, heads, head_dim)
    return (out, lse[:, :, :tokens]) if return_lse else out


def _own_keys(projection, kv_pool, interpret):
    """Finished keys and values of the scale; for queries alone, an array that nobody reads."""
    if projection.qkv.shape[2] == 1:
        return kv_pool.reshape(len(kv_pool), -1, kv_pool.shape[-1])
    return finished(projection, (K, V), interpret)


def _scratch(projection, config, chip: Products, several: int, stored: StoredBlocks) -> list:
    """Shared and tensor memory of a program, in the order of `_attend_tile`."""
    (_, _, tokens, head_dim), dtype = projection.shape, projection.dtype
    groups, size, buffers = config.warpgroups, config.block_k, config.buffers
    tile = partial(mosaic.tile, dtype=dtype, swizzle=chip.swizzle)
    landing = mosaic.landing(tokens, (groups, ROWS, head_dim), dtype, chip.swizzle)
    full = plgpu.Barrier(num_arrivals=stored.copies, num_barriers=buffers)
    free = plgpu.Barrier(num_arrivals=groups, num_barriers=buffers)
    return [
        # queries as they come, queries finished, a barrier that says that they are there
        [landing, tile((groups, ROWS, head_dim)), plgpu.Barrier(num_barriers=groups)],
        turn_scratch(projection, chip),
        # The result lies in the place of the queries where no other queries follow. Statistics.
        [landing] if several > 1 else [],
        plgpu.SMEM((groups, ROWS), jnp.float32),
        chip.weights((groups, ROWS, size), dtype),
        plgpu.Barrier(num_arrivals=groups),  # invalid values are cleared
        [[tile((buffers, size, head_dim)), full, free, *stored.scratch(buffers, head_dim)]] * 2,
        chip.scratch(groups, size, head_dim, *turn_widths(projection)),
    ]


def heads_of_a_program(rows: int, heads: int) -> int:
    """How many heads of a row a program serves, where one tile holds all queries of a head."""
    fits = (n for n in range(1, heads + 1) if heads % n == 0 and rows * heads // n >= PROGRAMS)
    return max(fits, default=1)


def shared_memory(config: tiles.MosaicConfig, head_dim: int, scaled: bool) -> int:
    """The most bytes of shared memory that a program of `attend` takes for 16-bit numbers, without
    barriers. scaled: whether the pool is int8."""
    groups, size = config.warpgroups, config.block_k
    steps = 2 * config.buffers * size
    # queries twice; the result may have a place of its own only where there is one warpgroup
    queries = groups * ROWS * head_dim * 2 + (groups == 1) * ROWS * head_dim
    numbers = queries + groups * ROWS * size + TURNED * TURNED + steps * head_dim
    return 2 * numbers + groups * ROWS * 4 + scaled * steps * (head_dim + 4)


def _attend_tile(
    config, chip: Products, several: int, length, given, own, stored, out_refs, *scratch
):
    (raw, queries, arrived), turn, results, statistics, weights, changed, parts, sums = scratch
    row, group = jax.lax.axis_index("row"), jax.lax.axis_index("warpgroup")
    begin = jax.lax.axis_index("head") * several
    first = (jax.lax.axis_index("tile") * config.warpgroups + group) * ROWS
    parts = [Part(half, *refs) for half, refs in enumerate(parts)]

    numbers = length[0], stored.layer[0]

    def keys_of(i) -> Keys:
        return Keys.of(stored, own, numbers, row, begin + i, given.heads)

    @pl.when(group == config.warpgroups)
    def _():
        if config.warpgroups > 1:  # a single computing warpgroup has all registers that it can use
            plgpu.set_max_registers(mosaic.MEMORY_REGISTERS, action="decrease")
        fetch_all(keys_of, stored, several, parts, config.buffers)

    @pl.when(group < config.warpgroups)
    def _():
        if config.warpgroups > 1:  # takes over what the fetching warpgroup has given back
            plgpu.set_max_registers(mosaic.COMPUTE_REGISTERS, action="increase")
        multiply = chip.multiply(sums, group)
        places = raw.at[group], queries.at[group], queries.at[group], arrived.at[group]
        work = TileMemory(*places, turn, multiply)
        add = chip.add(multiply, weights, group)
        tile = _Tile(work.tile, multiply, add, changed, group, config)
        # raw queries are not needed once they are finished: the result may take their place
        result, line = (results or [raw])[0].at[group], statistics.at[group]
        pl.when(group == 0)(lambda: given.start_turn(turn))
        given.start(Q, row, begin, first, work)
        given.wait_for_turn(turn)
        into = _Results(result, line, *out_refs, row, first)
        _see_heads(several, given, keys_of, parts, work, tile, into)


def _see_heads(
    several: int, given: Unfinished, keys_of, parts, work: TileMemory, tile, results
) -> None:
    """The work of a computing warpgroup for its heads, one after another. The queries of the first
    head are on their way. keys_of: function from i to the `Keys` of the program's i-th head."""
    row, first = results.row, results.first

    def head(i, before):
        keys = keys_of(i)
        given.finish(Q, keys.head, first, work)
        if several > 1:
            follows = i + 1 < several
            pl.when(follows)(lambda: given.start(Q, row, keys.head + 1, first, work))
        results.put(keys.head, *tile.see(keys, parts, before))
        return before + keys.steps

    jax.lax.fori_loop(0, several, head, 0)
    plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Results:
    """The results of a warpgroup's 64 queries, which begin with query `first`.

    out, line: their places in shared memory.
    out_ref, lse_ref: the arrays that they are copied to.
    """

    out: Ref
    line: Ref
    out_ref: Ref
    lse_ref: Ref
    row: Scalar
    first: Scalar

    def put(self, head, out, lse) -> None:
        """Start copying a head's mean of the values [64, H] and log-sum-exp [64]."""
        plgpu.wait_smem_to_gmem(0)  # the copies of the head before still read these places
        self.out[...] = out.astype(self.out.dtype)
        self.line[...] = lse
        plgpu.commit_smem()
        here, head_dim = pl.ds(self.first, ROWS), out.shape[1]
        columns = pl.ds(head * head_dim, head_dim)
        plgpu.copy_smem_to_gmem(self.out, self.out_ref.at[self.row, here, columns])
        plgpu.copy_smem_to_gmem(self.line, self.lse_ref.at[self.row, head, here])


def _masked(keys: Keys, step, scores):
    """Scores with -inf where a key is not valid."""
    return jnp.where(keys.valid(step, scores.shape, 1), scores, -jnp.inf)


@dataclass(frozen=True)
class _Tile:
    """The 64 queries of a warpgroup in shared memory."""

    queries: Ref
    multiply: Multiply
    add: Add
    changed: Ref  # a barrier: the first warpgroup has changed keys or values
    group: Scalar
    config: tiles.MosaicConfig

    def see(self, keys: Keys, parts, before) -> tuple:
        """(weighted mean of the values [64, H], log-sum-exp [64]) over all keys. before: how many
        steps the program has made for heads before this one."""
        head_dim = self.queries.shape[-1]
        # a loop keeps the layouts of what it carries, so they are named before it
        carry = (
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), LAYOUT),
        )
        step = partial(self._step, keys, *parts, before)
        # every query sees at least the scale's first token: the maximum is finite after step 0
        maximum, total, out = jax.lax.fori_loop(0, keys.steps, step, carry)
        return out / across(total, out.shape), maximum / LOG2_E + jnp.log(total)

    def _step(self, keys: Keys, k: Part, v: Part, before, i, carry):
        """One step of the online softmax. The maximum is in units of log2."""
        maximum, total, out = carry
        place = jax.lax.rem(before + i, self.config.buffers)
        partly = keys.is_partial(i)
        plgpu.barrier_wait(k.full.at[place])
        self._convert(keys, i, k, place)
        shape = (ROWS, keys.stored.size)
        scores = self.multiply(self.queries, turned(k.places.at[place]), shape)
        if k.raw is not None:  # one scale per key, so it may leave the sum over H
            scores *= down(keys.scales(k, i, place, PER_COLUMN), scores.shape)
        k.release(place)  # the next keys may come while the softmax is at work
        # after the product, so that keys that are not valid may hold anything
        scores = jax.lax.cond(partly, partial(_masked, keys, i), lambda s: s, scores)
        highest = jnp.maximum(maximum, scores.max(axis=1) * LOG2_E)
        rescale = jnp.exp2(maximum - highest)  # 0 in the first step, whose maximum was -inf
        weights = jnp.exp2(scores * LOG2_E - across(highest, scores.shape))
        total, out = total * rescale + weights.sum(axis=1), out * across(rescale, out.shape)
        plgpu.barrier_wait(v.full.at[place])
        if v.raw is not None:  # after the total, which sums the weights alone
            scales = down(keys.scales(v, i, place, PER_COLUMN), weights.shape)
            weights = jnp.where(weights > 0, weights * scales, 0.0)
        self._convert(keys, i, v, place)
        # int8 numbers are finite, so only own values of an int8 pool's call may be NaN
        unclean = partly if v.raw is None else partly & (i < keys.own_steps)
        pl.when(unclean)(lambda: self._clear(keys, i, v.places.at[place]))
        out = self.add(out, weights.astype(self.queries.dtype), v.places.at[place])
        v.release(place)
        return highest, total, out

    def _convert(self, keys: Keys, i, part: Part, place) -> None:
        """Convert a stored step of an int8 pool to the type of the own keys, without its scales."""
        if part.raw is None:
            return

        @pl.when(i >= keys.own_steps)
        def _():
            # one warpgroup converts for all: they share the step
            @pl.when(self.group == 0)
            def _():
                whole = mosaic.load(part.raw.at[place], LAYOUT)
                part.places[place] = whole.astype(part.places.dtype)
                plgpu.commit_smem()

            self._wait_for_change()

    def _clear(self, keys: Keys, i, values) -> None:
        """Write zeros in place of values that are not valid."""

        @pl.when(self.group == 0)
        def _():
            found = values[...]
            inside = keys.valid(i, found.shape, 0)
            values[...] = jnp.where(inside, found, jnp.zeros_like(found))
            plgpu.commit_smem()

        self._wait_for_change()

    def _wait_for_change(self) -> None:
        # a single warpgroup sees its own stores after `commit_smem`
        if self.config.warpgroups > 1:
            plgpu.barrier_arrive(self.changed)
            plgpu.barrier_wait(self.changed)
