"""Storing tokens in the pool on TPU (Mosaic): whole blocks are read, changed and written back.

HBM holds blocks in tiles, out of which no single bfloat16 or int8 row can be written. So for every
head of every row the kernel walks over the blocks that receive tokens: while one is put together,
the old contents of the next one are on their way in and the new contents of the last one on their
way out. Rows are picked from a float32 copy of all tokens in vector memory, where single rows can
be addressed; the old contents of the block lie behind the tokens, and a slot that keeps what it has
names its row there. float32 holds bfloat16 and int8 exactly, and nothing is added or multiplied on
the way, so what other rows hold (NaN included) does not matter. An int8 pool's scales are lanes
beside the rows.

HBM traffic in bytes, e and b bytes per element of tokens and pool, J_p and J blocks of a head that
are partly overwritten and that are written at all, S block_size:

    R N (2 T H e + (J_p + J) 2 H S b), int8: + R N (J_p + J) 4 max(128, 2 S) for scales

Vector memory: 4 (T + S) 2 H for the tokens, and the tokens in their own type twice. Heads that are
no multiple of 128 come packed, K beside V: a narrower array would be padded to 128 lanes.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tpu_operands
from pallas_kernels.cache_write.reference import LARGEST_INT8, inverse_scale
from pallas_kernels.tables import BlockWrites
from pallas_kernels.tpu_operands import LANES, block_of, block_shape, in_parts, rounded

EMPTY, PARTIAL, FULL, CONSECUTIVE = range(4)  # kinds of entries, in the low bits beside the id
KIND_BITS = 2
CHUNK = 128  # tokens that are converted at once


def write(kv_pool, projection, writes, kv_scale, *, interpret: bool):
    """See `api.write`.

    No head may list a block twice for something to store: the next block is read before the last
    one is written. Heads of a row follow each other, so they may share blocks.
    """
    k, v, writes = projection.keys(), projection.values(), writes.sliced()
    if not interpret:
        _check(k, kv_pool)
    tokens, head_dim = k.shape[2:]
    chunk = min(CHUNK, rounded(tokens, 32))  # whole tiles: 8 rows of float32, 16 of bfloat16
    padded = rounded(tokens, chunk)
    tables = _pack(writes, padded)
    given = tpu_operands.packed_tokens(k, v)
    pools = tpu_operands.pools(kv_pool, kv_scale, interpret)
    layout = _Layout.of(head_dim, kv_pool.shape[2], kv_scale is not None)
    found = pl.pallas_call(
        partial(_kernel, layout=layout, chunk=chunk, given=len(given), pools=len(pools)),
        grid=k.shape[:2],
        in_specs=[
            *map(tpu_operands.table_spec, tables),
            *(tpu_operands.whole_head(array, padded) for array in given),
            *tpu_operands.pool_specs(pools),
        ],
        out_specs=tpu_operands.pool_specs(pools),
        out_shape=[jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools],
        scratch_shapes=_scratch_shapes(layout, pools, padded),
        # Operands behind two tables and the tokens. Blocks that are not written keep their contents
        # only because a result is its operand.
        input_output_aliases={2 + len(given) + i: i for i in range(len(pools))},
        # two cores may share the rows, but not the heads, which may share blocks
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_vmem_limit(layout, padded, k.dtype),
        ),
        cost_estimate=_cost(given, pools, writes),
        interpret=interpret,
        name="cache_write",
    )(*tables, *given, *pools)
    # the compiler refuses an aliased result in HBM that is a donated argument and a result at once
    found = jax.lax.optimization_barrier(found)
    return found[0], None if kv_scale is None else found[1]


def _check(k, kv_pool) -> None:
    """Raise `NotImplementedError` for what the compiler cannot take."""
    head_dim, block_size = k.shape[-1], kv_pool.shape[2]
    way_out = "use implementation='reference'"
    if 2 * head_dim % LANES:
        raise NotImplementedError(
            f"storing on TPU takes heads of 64, 128, ..., not {head_dim}: {way_out}"
        )
    # a block's scales, two per slot, are one row of a part of at most 128 lanes (see `_Layout`)
    largest = LANES // 2 if kv_pool.dtype == jnp.int8 else LANES
    if block_size not in (8, 16, 32, 64, 128) or block_size > largest:
        raise NotImplementedError(
            f"storing on TPU takes blocks of 8, 16, ... {largest} slots in a pool of "
            f"{kv_pool.dtype}, not {block_size}: plan with one of them (policy argument "
            f"block_size) or {way_out}"
        )


# --- tables: a row of each in scalar memory per grid step ---


def _pack(writes: BlockWrites, padded: int) -> tuple[Array, Array]:
    """(int [*, N, 1, J + 2]: id and kind of every entry, an empty one, how many are in use; int [*,
    N, 1, J * block_size]: the row of the tokens in vector memory that each slot takes)."""
    ids, source = (a if writes.ids.ndim == 3 else a[None] for a in (writes.ids, writes.source))
    stored, slot = source >= 0, jnp.arange(source.shape[-1], dtype=jnp.int32)
    # A full block needs no read of what it held; a run of tokens is one load, not one per slot.
    consecutive = (source == source[..., :1] + slot).all(-1)
    kind = jnp.where(stored.any(-1), PARTIAL, EMPTY)
    kind = jnp.where(stored.all(-1), jnp.where(consecutive, CONSECUTIVE, FULL), kind)
    entry = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    used = jnp.where(kind > EMPTY, entry + 1, 0).max(-1, keepdims=True, initial=0)
    # The empty entry lets `_Head.step` look one entry ahead of the last without a case of its own.
    entries = jnp.concatenate([ids << KIND_BITS | kind, jnp.zeros_like(used), used], axis=-1)
    # Old contents lie behind the (padded) tokens, so that keeping a slot is picking one more row.
    source = jnp.where(stored, source, padded + slot)
    source = source.reshape(*ids.shape[:2], 1, -1)
    return entries.astype(jnp.int32)[:, :, None], source.astype(jnp.int32)


# --- vector memory ---


@dataclass(frozen=True)
class _Layout:
    """Lanes of a token in vector memory, cut into parts of at most 128: only in such an array can
    rows be read from any place on. parts: widths; the last one holds scales if `scaled`: those of
    the key in the first half of the lanes, those of the value in the second."""

    block_size: int
    parts: tuple[int, ...]
    scaled: bool

    @classmethod
    def of(cls, head_dim: int, block_size: int, scaled: bool) -> "_Layout":
        width = 2 * head_dim
        whole = width % LANES == 0
        parts = (LANES,) * (width // LANES) if whole else (width,)
        return cls(block_size, parts + (2 * block_size,) * scaled, scaled)

    @property
    def values(self) -> int:
        """Parts that hold keys and values."""
        return len(self.parts) - self.scaled

    def cut(self, values: Array) -> list[Array]:
        """The lanes of tokens [rows, 2 H] as parts."""
        firsts = [sum(self.parts[:i]) for i in range(self.values)]
        return [values[:, a : a + self.parts[i]] for i, a in enumerate(firsts)]


def _scratch_shapes(layout: _Layout, pools: list[Array], padded: int) -> list:
    """Tokens by part, a block by part; the old and the new block, two of each (pool and scales);
    semaphores [old or new, which of the two]."""
    # two of each: one is on its way while the other is used
    blocks = [pltpu.VMEM((2, *block_shape(pool)), pool.dtype) for pool in pools]
    return [
        *(pltpu.VMEM((padded + layout.block_size, w), jnp.float32) for w in layout.parts),
        *(pltpu.VMEM((layout.block_size, w), jnp.float32) for w in layout.parts),
        *blocks,
        *blocks,
        # apart, because the wait for a block must not be ended by the arrival of another one
        pltpu.SemaphoreType.DMA((2, 2)),
    ]


def _vmem_limit(layout: _Layout, padded: int, dtype) -> int | None:
    """Bytes of vector memory that the kernel asks for; None where the default of 16 MiB will do."""
    lanes = sum(rounded(width, LANES) for width in layout.parts)
    tokens = padded * rounded(sum(layout.parts[: layout.values]), LANES)
    # 1 MiB leaves room for the blocks. An estimate: hence 14 of 16 MiB, and a quarter on top.
    needed = 4 * padded * lanes + 2 * tokens * dtype.itemsize + 2**20
    return None if needed <= 14 * 2**20 else needed * 5 // 4


def _cost(given: list[Array], pools: list[Array], writes: BlockWrites) -> pl.CostEstimate:
    """As if every entry were partly overwritten."""
    rows, heads = given[0].shape[:2]
    blocks = rows * heads * writes.ids.shape[-1]
    moved = sum(array.size * array.dtype.itemsize for array in given)
    block_bytes = (p.dtype.itemsize * math.prod(block_shape(p)) for p in pools)
    moved += sum(2 * blocks * size for size in block_bytes)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)


# --- the kernel ---


def _kernel(*refs, layout: _Layout, chunk: int, given: int, pools: int):
    entries, source, *refs = refs
    parts = len(layout.parts)
    # the pools as operands are left out: they are the same memory as the results
    new_tokens, _, *state = in_parts(refs, given, pools, pools, parts, parts, pools, pools, 1)
    head = _Head(layout, pl.program_id(0), entries, source, *state[:-1], state[-1][0])

    @pl.when(head.used > 0)
    def _():
        head.read(0)  # on its way while the tokens are converted
        _convert(new_tokens, head.tokens, layout, chunk)
        jax.lax.fori_loop(0, head.used, lambda j, _: head.step(j), 0)
        # The last two stores have had no step after them that waits. No copy may outlive the grid
        # step: the next one uses the same memory and semaphores.
        head.wait_stored(head.used - 2)
        head.wait_stored(head.used - 1)


def _convert(given, tokens, layout: _Layout, chunk: int) -> None:
    """Put the tokens into vector memory as rows of float32; for an int8 pool whole numbers and
    their scales."""

    def step(i, _):
        here = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        parts = [array[0, 0, here].astype(jnp.float32) for array in given]
        # Rows behind T are undefined (NaN perhaps) and converted with the others: no row mixes with
        # another, and no slot names them.
        if layout.scaled:
            values, scales = _quantized(jnp.concatenate(parts, axis=-1), layout.block_size)
            tokens[-1][here] = scales
            parts = [values]
        for part, values in zip(tokens, layout.cut(jnp.concatenate(parts, axis=-1)), strict=False):
            part[here] = values
        return 0

    jax.lax.fori_loop(0, given[0].shape[2] // chunk, step, 0)


def _quantized(
    kv: Float[Array, "rows KV"], block_size: int
) -> tuple[Float[Array, "rows KV"], Float[Array, "rows two_block_size"]]:
    """Tokens as whole numbers, and their scales: of the key in the first half of the lanes, of the
    value in the second. The same numbers as `reference.quantize`."""
    is_key = _is_first_half(kv.shape)
    size = jnp.abs(kv)
    k_scale, v_scale = (
        jnp.where(half, size, 0.0).max(axis=1, keepdims=True) / LARGEST_INT8
        for half in (is_key, ~is_key)
    )
    whole = jnp.round(kv * jnp.where(is_key, inverse_scale(k_scale), inverse_scale(v_scale)))
    return whole, jnp.where(_is_first_half((len(kv), 2 * block_size)), k_scale, v_scale)


def _is_first_half(shape):
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1) < shape[1] // 2


@dataclass(frozen=True)
class _Head:
    """One head of one row: its tables (SMEM), all pools, and what is in vector memory: tokens with
    the old block behind them and the block that is put together, by part; the old and the new
    block as the pools hold them, two of each."""

    layout: _Layout
    row: Any
    entries: Any
    source: Any
    pools: list
    tokens: list
    block: list
    old: list
    new: list
    semaphores: Any

    @property
    def used(self) -> Int[Array, ""]:
        """Entries up to the last one that stores something."""
        return self.entries[0, 0, 0, self.entries.shape[-1] - 1]

    def kind(self, j):
        return self.entries[0, 0, 0, j] & (2**KIND_BITS - 1)

    def read(self, j) -> None:
        """Start reading the block of an entry that keeps some of it."""

        @pl.when(self.kind(j) == PARTIAL)
        def _():
            for copy in self._copies(j, reads=True):
                copy.start()

    def wait_stored(self, j) -> None:
        """Until the block of an entry (if there is such an entry) is in the pool."""

        # an empty entry has started no store, and a wait for none would never end
        @pl.when((j >= 0) & (self.kind(jnp.maximum(j, 0)) > EMPTY))
        def _():
            for copy in self._copies(j, reads=False):
                copy.wait()

    def _copies(self, j, reads: bool):
        block = self.entries[0, 0, 0, j] >> KIND_BITS
        which = jax.lax.rem(j, 2)
        # A wait has to name the same copies as their start: both come from here.
        semaphore = self.semaphores.at[0 if reads else 1, which]
        for pool, here in zip(self.pools, self.old if reads else self.new, strict=True):
            ends = (block_of(pool, self.row, block), here.at[which])
            yield pltpu.make_async_copy(*(ends if reads else ends[::-1]), semaphore)

    def step(self, j) -> int:
        """Put the block of entry j together and start storing it."""
        # Reading j + 1 while j - 1 and j - 2 are being stored is safe, because no block is listed
        # twice. Its buffer is that of j - 1, which step j - 1 has unpacked.
        self.read(j + 1)
        self.wait_stored(j - 2)  # before its memory takes the new block
        kind = self.kind(j)
        pl.when(kind == PARTIAL)(lambda: self._unpack_old(j))
        pl.when(kind == CONSECUTIVE)(lambda: self._pick_run(j))
        pl.when((kind == PARTIAL) | (kind == FULL))(lambda: self._pick_rows(j))
        pl.when(kind > EMPTY)(lambda: self._store(j))
        return 0

    def _unpack_old(self, j) -> None:
        for copy in self._copies(j, reads=True):
            copy.wait()
        which, size = jax.lax.rem(j, 2), self.layout.block_size
        # one place for all old blocks: the rows that step j - 1 kept are picked already
        behind = pl.ds(self.tokens[0].shape[0] - size, size)
        values = self.layout.cut(self.old[0][which].astype(jnp.float32))
        for part, new in zip(self.tokens, values, strict=False):
            part[behind] = new
        if self.layout.scaled:
            self.tokens[-1][behind] = jnp.broadcast_to(self.old[1][which], (size, 2 * size))

    def _pick_run(self, j) -> None:
        size = self.layout.block_size
        first = self.source[0, 0, 0, j * size]
        for block, tokens in zip(self.block, self.tokens, strict=True):
            block[...] = tokens[pl.ds(first, size)]

    def _pick_rows(self, j) -> None:
        size = self.layout.block_size
        for i in range(size):
            row = self.source[0, 0, 0, j * size + i]
            for block, tokens in zip(self.block, self.tokens, strict=True):
                block[pl.ds(i, 1)] = tokens[pl.ds(row, 1)]

    def _store(self, j) -> None:
        which, size = jax.lax.rem(j, 2), self.layout.block_size
        # float32 holds old contents exactly (int8: whole numbers), so storing them again changes
        # nothing; only new tokens of a wider type than the pool's are rounded.
        values = [part[...] for part in self.block[: self.layout.values]]
        self.new[0][which] = jnp.concatenate(values, axis=-1).astype(self.new[0].dtype)
        if self.layout.scaled:
            # slot i's scales are lanes i and block_size + i of row i; an old row holds all of them
            scales = self.block[-1][...]
            lane = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 1)
            slot = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 0)
            own = (lane == slot) | (lane == slot + size)
            self.new[1][which] = jnp.where(own, scales, 0.0).sum(axis=0, keepdims=True)
        for copy in self._copies(j, reads=False):
            copy.start()
