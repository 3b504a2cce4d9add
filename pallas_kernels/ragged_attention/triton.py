"""Ragged attention on NVIDIA GPUs with Pallas-Triton. See `api` for what it computes.

Tiling of the attention. One program serves `block_q` queries of one head of one row. It holds the
query tile, the float32 accumulator and the running maximum and sum, and walks over keys in steps of
`block_k`: own keys first, then the head's table. There is at least one own key, so the maximum is
finite from the first step on, and empty heads need no case of their own. (A special case for full
steps of own keys, which need no mask, costs more shared memory than it saves.)

Stored keys are numbered through the table, so a step joins as many blocks as it needs, for any
block size, and a program stops after the last entry that its head uses. Loads are masked with the
entry's range: invalid slots cost no traffic, and what they hold (NaN) never meets arithmetic. Tiles
of padded queries only write zeros. Tables hold all layers: a number says which one is read.

Operands lie as the product left them, [R, T, 3, N, H]; the result is [R, T, N, H]. Rows of a head
are H numbers each, 3 N H or N H apart. A program finishes its queries (bias, norm, rotation;
float32, rounded once). The bias of values is added to their weighted sum. XLA finishes own keys
once and moves 2 H numbers per key for it. In the kernel each of the ceil(T / block_q) programs
would do it again: a norm is 2 H operations per key (on an A100 8 H, because all four warps hold a
step's keys) beside the 10 or so per query and key of the softmax; a rotation reads 8 H bytes of
angles beside the 4 H of the bfloat16 key and value; and heads of 128 would need more registers than
there are. The kernel finishes own keys only where one small step holds all of them (tokens of a
decoding step, small scales), which saves XLA's kernel.

Traffic, with b bytes per element, t real tokens and P' valid slots of a head. The tiles of a head
run side by side, so all but the first find its keys in the L2 cache. From memory come R N H b (3 t
+ 2 P') bytes, and R N H b T go out. Keys that XLA finishes add R N H b T in and out. From the cache
come R N H b 2 (t + P') ceil(t / block_q). Tables are 8 M bytes per program, and 12 per key of a
step, from the cache.

Arithmetic. Scores are products in the type of the projection with float32 sums. Exponentials are
float32 powers of two of scores times log2(e). Weights are rounded to the type of the projection
before the second product. int8 keys and values are exact in bfloat16; their scales multiply scores
and weights.

Tiling of the moments. One program serves `block_k` columns (keys) of one head of one row. It loads
and finishes their keys once, walks over the queries in steps of `block_q`, computes weights again
from scores and log-sum-exp, and adds them up per key in float32. No matrix of queries by keys
leaves the registers, and programs whose columns hold no key only write zeros. The walk ends with
the last query of non-zero weight; queries of weight zero (padding) never meet arithmetic. Queries
are walked over (P + T) / block_k times (11 in the last scale of VAR-d30, 164 in that of
Infinity-2B), so XLA finishes them once.

Traffic of the moments. From memory come R N H b (2 Q + T + P') bytes; R N H b Q and R N (P + T) 4
bytes per moment go out. From the L2 cache every program reads the queries, R N H b Q, so (P + T) /
block_k times.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels import estimates
from pallas_kernels.cache_write import triton as cache_write
from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.ragged_attention.reference import dot, in_turn
from pallas_kernels.refs import Operand, one_number
from pallas_kernels.shared.triton_operands import (
    HeadTables,
    Tokens,
    check,
    head_spec,
    line_spec,
    load,
    row_spec,
    rows_at,
)
from pallas_kernels.tables import BlockTable

LOG2_E = math.log2(math.e)
AT_ONCE = 1024  # numbers that are searched side by side: 8 for each of the 128 threads of 4 warps
IDS, START, STOP = range(3)  # of a head's tables
# A program finishes own keys of up to this many numbers by itself: 32 per thread of four warps.
ONE_STEP = 4096


# --- reading what is stored, calls with a grid (tiles, heads, rows) ---


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredSlots:
    """The pool and table of a call as kernel operands.

    The pool is seen as slots [R, P', 2 H] and the scales as lines [R, 2 P'], both without a copy.
    Inside a kernel they are those of one row. Key g of a head is slot g % block_size of entry g //
    block_size of its table.
    """

    tables: HeadTables
    kv_pool: Operand
    kv_scale: Operand
    block_size: int = field(metadata=dict(static=True))

    @classmethod
    def of(cls, kv_pool: Array, table: BlockTable, kv_scale: Array | None) -> "StoredSlots":
        """The operands of a call. An empty table becomes one empty entry, an empty pool one block,
        because a kernel cannot have an array without elements."""
        entries = table.ids, table.start, table.stop
        if not table.ids.shape[-1]:
            # start == stop: the entry is empty
            entries = (jnp.zeros((*table.ids.shape[:-1], 1), jnp.int32),) * 3
        if not kv_pool.shape[1]:
            kv_pool = jnp.zeros((kv_pool.shape[0], 1, *kv_pool.shape[2:]), kv_pool.dtype)
            if kv_scale is not None:
                kv_scale = jnp.zeros((len(kv_scale), 1, kv_scale.shape[2]), kv_scale.dtype)
        rows, _, block_size, width = kv_pool.shape
        # merging adjacent axes moves no data
        if kv_scale is not None:
            kv_scale = kv_scale.reshape(rows, -1)
        tables = HeadTables.of(table.layer, *entries)
        return cls(tables, kv_pool.reshape(rows, -1, width), kv_scale, block_size)

    @property
    def specs(self) -> "StoredSlots":
        """The table of one head and the pool of one row, for a grid (tiles, heads, rows)."""
        scale = None if self.kv_scale is None else row_spec(self.kv_scale)
        return replace(
            self, tables=self.tables.specs, kv_pool=row_spec(self.kv_pool), kv_scale=scale
        )

    @property
    def entries(self) -> int:
        """M."""
        return self.tables.arrays[IDS].shape[-1]

    # --- inside a kernel ---

    def used(self) -> Int[Array, ""]:
        """Keys up to the last entry that the head uses."""
        load = self.tables.load
        entries = last_true(lambda *at: load(STOP, *at) > load(START, *at), self.entries)
        return entries * self.block_size

    def read(self, key: Int[Array, " K"], dtype, halves: int = 2):
        """[(K or V [K, H], its scales [K] or None)], K first, `halves` of them; zero where not
        owned, and the mask [K]."""
        entry, offset = key // self.block_size, key % self.block_size
        # A step may reach beyond the table, where start = stop = 0 is loaded: no slot is owned.
        inside = entry < self.entries
        ids, start, stop = (self.tables.load(i, entry, inside) for i in (IDS, START, STOP))
        owned = (offset >= start) & (offset < stop)
        slot = ids * self.block_size + offset
        # a block has twice as many scales as slots: those of its keys, then those of its values
        place = ids * 2 * self.block_size + offset
        # Both loads are masked: NaN in slots that the head does not own, or in their scales, is
        # replaced by 0 before any arithmetic and costs no traffic.
        found = []
        for half in range(halves):
            scale = None
            if self.kv_scale is not None:
                scale = load(self.kv_scale, place + half * self.block_size, owned)
            values = rows_at(self.kv_pool, slot, owned, self.kv_pool.shape[-1] // 2, half)
            found.append((values.astype(dtype), scale))  # bfloat16 holds -127 ... 127 exactly
        return found, owned


def last_true(where, length: int) -> Int[Array, ""]:
    """One more than the last index below `length` for which `where(index, inside)` is true, or 0.

    where: called inside a kernel with some of the indices and whether they are below `length`.
    """
    size = min(AT_ONCE, pl.next_power_of_2(length))

    def last(i, found):
        index = i * size + jnp.arange(size, dtype=jnp.int32)
        inside = index < length
        return jnp.maximum(found, jnp.max(jnp.where(where(index, inside), index + 1, 0)))

    return jax.lax.fori_loop(0, pl.cdiv(length, size), last, jnp.int32(0))


def _call(kernel, given, results, *, grid, config, cost, interpret, name) -> list[Array]:
    """Run `kernel(given, results)`, which gets references in place of arrays, in a grid of programs
    per head, heads, rows. given: pairs of an operand and its BlockSpec. results: pairs of a shape
    with its type and a BlockSpec. config: tiles."""
    operands, in_specs = zip(*given, strict=True)
    out_shape, out_specs = zip(*results, strict=True)

    return pl.pallas_call(
        lambda given, *results: kernel(given, results),
        # The first axis is blockIdx.x, which counts fastest: tiles of a head follow one another.
        # It is also the only one that CUDA lets exceed 65,535.
        grid=grid,
        in_specs=[in_specs],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )(operands)


# --- attention ---


def attend(projection, new_length, kv_pool, table, kv_scale, *, return_lse, interpret, config=None):
    """See `api.attend`. config: tiles; None takes those of `config.choose`."""
    check(projection, kv_pool, kv_scale, interpret)
    config = config or tiles.choose(tiles.Call.of("attend", projection, kv_pool, table), "triton")
    stored = StoredSlots.of(kv_pool, table, kv_scale)
    rows, heads, tokens, head_dim = projection.shape
    keys, programs = Tokens.keys(projection), pl.cdiv(tokens, config.block_q)
    together = max(16, pl.next_power_of_2(tokens))  # tensor cores multiply at least 16 rows
    if together > config.block_k or together * head_dim > ONE_STEP:
        keys = keys.with_rows(projection.keys())
    step = config.block_k if keys.done else together
    given = [Tokens.queries(projection), keys, Tokens.values(projection), stored]
    shape = jax.ShapeDtypeStruct((rows, tokens, heads, head_dim), projection.dtype)
    tile = pl.BlockSpec((None, config.block_q, None, head_dim), lambda i, n, r: (r, i, n, 0))
    lse = jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32)
    line = pl.BlockSpec((None, None, config.block_q), lambda i, n, r: (r, n, i))
    found = _call(
        partial(_attend_tile, config, step, tokens),
        [(one_number(new_length), line_spec(1)), *((a, a.specs) for a in given)],
        [(shape, tile)] + [(lse, line)] * return_lse,
        grid=(programs, heads, rows),
        config=config,
        cost=estimates.attend(projection, kv_pool, table, lse=return_lse),
        interpret=interpret,
        name="ragged_attention",
    )
    return (found[0], found[1]) if return_lse else found[0]


store_and_attend = in_turn(attend, cache_write.write)


def _attend_tile(config, own_step: int, tokens: int, given, out_refs):
    length_ref, queries, keys, values, stored = given
    length, first = length_ref[0], pl.program_id(0) * config.block_q
    query = first + jnp.arange(config.block_q, dtype=jnp.int32)

    def write(out, *lse):
        # the last tile may reach beyond T, where the next row's tokens (or no memory) lie
        plgpu.store(out_refs[0], out.astype(out_refs[0].dtype), mask=(query < tokens)[:, None])
        for ref, value in zip(out_refs[1:], lse, strict=False):  # without return_lse none is left
            plgpu.store(ref, value, mask=query < tokens)

    @pl.when(first < length)
    def _():
        # Zeros instead of padded queries (which may be NaN) keep the padding of the result finite.
        # Always one turn, which the compiler does not know: without the loop, registers of this and
        # of what follows were mixed, and an A100 spilled some with rotated heads of 128.
        q = jax.lax.fori_loop(
            0,
            jnp.minimum(length, 1),
            lambda *_: queries.finished(query, query < length).astype(queries.dtype),
            jnp.zeros((config.block_q, queries.head_dim), queries.dtype),
        )
        maximum, total, sums = _walk(config, own_step, q, length, keys, values, stored)
        # total is never 0: the largest score has added exp2(0) to it
        write(sums / total[:, None], maximum / LOG2_E + jnp.log(total))

    # Tiles of padding are written, too: fresh memory may hold NaN, and results have to be finite.
    empty = (jnp.zeros(shape, jnp.float32) for shape in (out_refs[0].shape, query.shape))
    pl.when(first >= length)(lambda: write(*empty))


def _walk(config, own_step: int, q, length, keys: Tokens, values: Tokens, stored: StoredSlots):
    """(maximum, sum of weights, weighted sum of values) of a query tile over all its keys."""
    size, head_dim = config.block_k, q.shape[1]

    def own(i, carry):
        key = i * own_step + jnp.arange(own_step, dtype=jnp.int32)
        real = key < length
        k = keys.raw(key, real) if keys.done else keys.finished(key, real).astype(keys.dtype)
        # values are masked as well: padding may be NaN, and a weight of 0 times NaN is NaN
        return _step(q, (k, None), (values.raw(key, real), None), real, carry)

    def old(i, carry):
        # int8 keys and values are converted without their scales, which stay float32: both products
        # keep the type of the own keys and nothing is rounded twice
        key = i * size + jnp.arange(size, dtype=jnp.int32)
        (k, v), owned = stored.read(key, keys.dtype)
        return _step(q, k, v, owned, carry)

    queries = q.shape[0]
    # -inf cannot meet -inf in `_step` (which would be NaN): step 0 of `own` holds token 0, which is
    # always real, and from then on the maximum is finite, also in steps where nothing is owned.
    carry = (
        jnp.full((queries,), -jnp.inf, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        jnp.zeros((queries, head_dim), jnp.float32),
    )
    steps = pl.cdiv(length, own_step) if keys.done else 1
    maximum, total, sums = jax.lax.fori_loop(0, steps, own, carry)
    if values.bias is not None:
        # so far weights are those of own tokens alone, each of which brings the bias
        sums += total[:, None] * values.bias_row()[None]
    # the trip count is data: a head that owns nothing makes no step at all
    carry = maximum, total, sums
    return jax.lax.fori_loop(0, pl.cdiv(stored.used(), size), old, carry)


def _step(q, k, v, mask, carry):
    """One step of the online softmax. The maximum is in units of log2."""
    (k, k_scale), (v, v_scale), (maximum, total, sums) = k, v, carry
    scores = dot(q, k, (1, 1))
    if k_scale is not None:
        scores *= k_scale[None]  # one per key, so it may leave the sum over H
    # Masked keys are rows of zeros, whose score of 0 would count; -inf has the weight 0 exactly.
    scores = jnp.where(mask[None], scores, -jnp.inf)
    # The hardware's exponential is exp2; log2(e) joins the subtraction in one multiply-add.
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1) * LOG2_E)
    weights = jnp.exp2(scores * LOG2_E - new_maximum[:, None])
    rescale = jnp.exp2(maximum - new_maximum)  # 0 in the first step: nothing was summed before it
    total = total * rescale + jnp.sum(weights, axis=1)
    if v_scale is not None:  # only after `total`, which sums the weights alone
        weights *= v_scale[None]
    sums = sums * rescale[:, None] + dot(weights.astype(v.dtype), v, (1, 0))
    return new_maximum, total, sums


# --- sums over queries ---


def attention_moments(
    projection, new_length, kv_pool, table, sums, kv_scale, *, interpret, config=None
):
    """See `api.attention_moments`. config: tiles; None takes those of `config.choose`."""
    check(projection, kv_pool, kv_scale, interpret)
    call = tiles.Call.of("attention_moments", projection, kv_pool, table)
    config = config or tiles.choose(call, "triton")
    rows, heads, own, _ = projection.shape
    stored, old = StoredSlots.of(kv_pool, table, kv_scale), call.slots
    # Every program walks over all queries: finished once, they are read (P + T) / block_k times.
    queries = Tokens.queries(projection)
    queries, keys = queries.with_rows(projection.queries()), Tokens.keys(projection)
    # whole lines: the tiles of own keys start at column `old`, which is no multiple of block_k
    columns = (jax.ShapeDtypeStruct((rows, heads, old + own), jnp.float32), head_spec(old + own))
    # Programs own columns, not queries: each sums its columns over all queries by itself, so no two
    # programs add to one number (no atomics, the same result in every run).
    found = _call(
        partial(_sum_columns, config, old),
        [
            (one_number(new_length), line_spec(1)),
            (queries, queries.specs),
            (keys, keys.specs),
            (sums.weights.astype(jnp.float32), line_spec(own)),
            (sums.lse, head_spec(own)),
            (stored, stored.specs),
        ],
        [columns] * (1 + sums.squares),
        grid=(pl.cdiv(old, config.block_k) + pl.cdiv(own, config.block_k), heads, rows),
        config=config,
        cost=estimates.attention_moments(projection, kv_pool, table, squares=sums.squares),
        interpret=interpret,
        name="attention_moments",
    )
    return found[0], found[1] if sums.squares else None


def _sum_columns(config, old: int, given, out_refs):
    """Sum one tile of columns. Tiles of own keys come after those of the table, which has `old`
    slots."""
    length_ref, queries, keys, weight_ref, lse_ref, stored = given
    size, own = config.block_k, weight_ref.shape[0]
    key = pl.program_id(0) * size + jnp.arange(size, dtype=jnp.int32)
    token = key - pl.cdiv(old, size) * size  # negative in tiles of the table
    new = (token >= 0) & (token < length_ref[0])
    # In tiles of own keys `key` lies behind the last entry, so nothing is read from the pool; in
    # tiles of the table no own token is. One of the two loads is all zeros, the sum is the other.
    [(k, scale)], owned = stored.read(key, keys.dtype, halves=1)
    k += keys.finished(token, new).astype(keys.dtype)
    # Scores and log-sum-exp become powers of two; int8: the scale of a key, own keys have none.
    factor = LOG2_E if scale is None else (jnp.where(new, 1, scale) * LOG2_E)[:, None]
    last = last_true(lambda i, inside: load(weight_ref, i, inside) != 0, own)
    # columns without any key make no step, but are written: the result is 0 there, not unspecified
    found = jnp.max((owned | new).astype(jnp.int32))
    steps = jnp.where(found > 0, pl.cdiv(last, config.block_q), 0)
    sums = tuple(jnp.zeros((size,), jnp.float32) for _ in out_refs)
    walk = partial(_add, config.block_q, k, factor, queries, weight_ref, lse_ref)
    sums = jax.lax.fori_loop(0, steps, walk, sums)
    # a tile may reach beyond its part of the columns, into the other one or out of the array
    column = jnp.where(token >= 0, old + token, key)
    inside = jnp.where(token >= 0, token < own, key < old)
    for ref, total in zip(out_refs, sums, strict=True):
        # a column without a key has scores of 0, whose weights are not
        plgpu.store(ref.at[column], jnp.where(owned | new, total, 0), mask=inside)


def _add(size: int, k, factor, queries: Tokens, weight_ref, lse_ref, i, sums):
    """Add the weights of the queries of step i to the sums."""
    query = i * size + jnp.arange(size, dtype=jnp.int32)
    inside = query < weight_ref.shape[0]
    weight, lse = (load(ref, query, inside) for ref in (weight_ref, lse_ref))
    # keys are rows here, so that the sum over queries runs within a row
    scores = dot(k, queries.raw(query, inside), (1, 1)) * factor
    p = jnp.exp2(scores - (lse * LOG2_E)[None])
    p = jnp.where((weight != 0)[None], p, 0)  # padded queries may be NaN, and 0 * NaN is NaN
    found = [p * weight[None]]
    if len(sums) == 2:
        found.append(p * found[0])  # p squared, weighted once
    return tuple(a + jnp.sum(b, axis=1) for a, b in zip(sums, found, strict=True))
