"""Storing tokens in the pool on TPU (Mosaic): whole blocks are read, changed and written back.

HBM holds blocks in tiles, out of which no single bfloat16 or int8 row can be written. So for all
heads of a grid step the kernel walks over the blocks that receive tokens: while one is put
together, the old contents of the next one are on their way in and the new contents of the last one
on their way out. Heads of a row may share a block: one that is still on its way out is waited for
before it is read again, and heads of a row run one after the other on one core.

Keys and values are finished, and those of a head put side by side as the pool holds them, in
float32 rows in vector memory, where single rows can be addressed; the old contents of the block lie
behind the tokens, and a slot that keeps what it has names its row there. float32 holds bfloat16 and
int8 exactly, and from there on nothing is added or multiplied, so what other rows hold (NaN
included) does not matter. An int8 pool's scales are lanes beside the rows.

HBM traffic in bytes, e and b bytes per element of tokens and pool, J_p and J blocks of a head that
are partly overwritten and that are written at all, S block_size:

    R N (2 T H e + (J_p + J) 2 H S b), int8: + R N (J_p + J) 4 max(128, 2 S) for scales

Vector memory: 4 (T + S) 2 H for the tokens of each head of 128 lanes, and the tokens of the heads
of a step in their own type twice.
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
from pallas_kernels.tables import CONSECUTIVE, EMPTY, FULL, KIND_BITS, PARTIAL, BlockWrites
from pallas_kernels.tpu_operands import LANES, block_of, block_shape, in_parts, rounded
from pallas_kernels.tpu_projection import Heads, Own, operands

CHUNK = 128  # tokens that are converted at once


def write(kv_pool, projection, writes, kv_scale, *, interpret: bool):
    """See `api.write`.

    No head may list a block twice for something to store: the next block is read before the last
    one is written. Heads of a row follow each other, so they may share blocks.
    """
    if not interpret:
        _check(projection, kv_pool)
    tokens, head_dim = projection.shape[2:]
    chunk = min(CHUNK, rounded(tokens, 32))  # whole tiles: 8 rows of float32, 16 of bfloat16
    padded = rounded(tokens, chunk)
    writes = writes.with_packed()
    heads = Heads.of(projection, writes)
    table = tpu_operands.table_rows(writes, heads)
    whole = (padded, lambda *_: 0)
    given = operands(projection, heads, {"k": whole, "v": whole})
    pools = tpu_operands.pools(kv_pool, kv_scale, interpret)
    layout = _Layout.of(head_dim, kv_pool.shape[2], kv_scale is not None)
    arrays, in_specs = zip(*given.values(), strict=True)
    kernel = partial(_kernel, layout=layout, heads=heads, chunk=chunk, given=tuple(given))
    found = pl.pallas_call(
        partial(kernel, pools=len(pools), dtype=projection.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(kv_pool), heads.steps),
            in_specs=[
                tpu_operands.table_spec(writes, table, heads),
                *in_specs,
                *tpu_operands.pool_specs(pools),
            ],
            out_specs=tpu_operands.pool_specs(pools),
            scratch_shapes=_scratch_shapes(layout, heads, pools, padded),
        ),
        out_shape=[jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools],
        # Operands behind the layer, the table and the tokens. Blocks that are not written keep
        # their contents only because a result is its operand.
        input_output_aliases={2 + len(given) + i: i for i in range(len(pools))},
        # heads may share blocks, rows do not
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_vmem_limit(layout, heads, padded, projection),
        ),
        cost_estimate=_cost(projection, pools, writes),
        interpret=interpret,
        name="cache_write",
    )(tpu_operands.layer_of(writes), table, *arrays, *pools)
    # the compiler refuses an aliased result in HBM that is a donated argument and a result at once
    found = jax.lax.optimization_barrier(found)
    return found[0], None if kv_scale is None else found[1]


def _check(projection, kv_pool) -> None:
    """Raise `NotImplementedError` for what the compiler cannot take."""
    head_dim, block_size = projection.shape[-1], kv_pool.shape[2]
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


def _scratch_shapes(layout: _Layout, heads: Heads, pools: list[Array], padded: int) -> list:
    """Tokens of the heads at work by part, a block by part; the old and the new block, two of each
    (pool and scales); semaphores [old or new, which of the two]; counters."""
    # two of each: one is on its way while the other is used
    blocks = [pltpu.VMEM((2, *block_shape(pool)), pool.dtype) for pool in pools]
    tokens = (heads.together, padded + layout.block_size)
    return [
        *(pltpu.VMEM((*tokens, w), jnp.float32) for w in layout.parts),
        *(pltpu.VMEM((layout.block_size, w), jnp.float32) for w in layout.parts),
        *blocks,
        *blocks,
        # apart, because the wait for a block must not be ended by the arrival of another one
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.SMEM((3,), jnp.int32),
    ]


def _vmem_limit(layout: _Layout, heads: Heads, padded: int, projection) -> int | None:
    """Bytes of vector memory that the kernel asks for; None where the default of 16 MiB will do."""
    lanes = heads.together * sum(rounded(width, LANES) for width in layout.parts)
    given = 4 * heads.groups * rounded(heads.width, LANES) * projection.dtype.itemsize
    rotation = 0 if projection.rotation is None else 4 * rounded(heads.width, LANES)
    # 1 MiB leaves room for the blocks. An estimate: hence 14 of 16 MiB, and a quarter on top.
    needed = padded * (4 * lanes + given + rotation) + 2**20
    return None if needed <= 14 * 2**20 else needed * 5 // 4


def _cost(projection, pools: list[Array], writes: BlockWrites) -> pl.CostEstimate:
    """As if every entry were partly overwritten."""
    rows, heads = projection.shape[:2]
    blocks = rows * heads * writes.ids.shape[-1]
    moved = projection.qkv.size // 3 * 2 * projection.dtype.itemsize
    block_bytes = (p.dtype.itemsize * math.prod(block_shape(p)) for p in pools)
    moved += sum(2 * blocks * size for size in block_bytes)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)


# --- the kernel ---


def _kernel(_, table, *refs, layout, heads: Heads, chunk: int, given, pools: int, dtype):
    parts = len(layout.parts)
    # the pools as operands are left out: they are the same memory as the results
    own, _, *state = in_parts(refs, len(given), pools, pools, parts, parts, pools, pools, 2)
    own = Own.of(heads, 1.0, dict(zip(given, own, strict=True)))
    stores = _Stores(layout, pl.program_id(0), table, *state[:-1], *state[-1])
    stores.start()  # the first block is on its way while the tokens are converted

    def group(i):
        mine = [i * heads.together + which for which in range(heads.together)]

        @pl.when(sum(stores.used(head) for head in mine) > 0)
        def _():
            _convert(own, i, stores.tokens, layout, chunk, dtype)

        for which, head in enumerate(mine):
            stores.store(head, which)

    heads.for_each_group(group)
    # No copy may outlive the grid step: the next one uses the same memory and semaphores, and may
    # read the same blocks.
    for which in range(2):
        stores.wait_stored(which)


def _convert(own: Own, group, tokens, layout: _Layout, chunk: int, dtype) -> None:
    """Put the tokens of a group of heads into vector memory, finished, as rows of float32; for an
    int8 pool whole numbers and their scales."""

    def step(i, _):
        here = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        # Rows behind T are undefined (NaN perhaps) and converted with the others: no row mixes with
        # another, and no slot names them.
        k, v = own.keys(group, here), own.values(group, here)
        for which in range(own.heads.together):
            # rounded as the reference rounds them, whatever the type of the pool
            kv = own.heads.side_by_side(k, v, which).astype(dtype).astype(jnp.float32)
            if layout.scaled:
                kv, tokens[-1][which, here] = _quantized(kv, layout.block_size)
            for part, values in zip(tokens, layout.cut(kv), strict=False):
                part[which, here] = values
        return 0

    jax.lax.fori_loop(0, (tokens[0].shape[1] - layout.block_size) // chunk, step, 0)


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
class _Stores:
    """Some heads of one row, whose entries are stored in order.

    table: their rows (SMEM, `BlockWrites.packed`). pools: whole, in HBM. In vector memory: tokens,
    with the old block behind them, and the block that is put together, by part; the old and the new
    block as the pools hold them, two of each.
    state: (SMEM) entries so far, and for each of the two new blocks where it is being stored: the
    block's number + 1, or 0.
    """

    layout: _Layout
    row: Any
    table: Any
    pools: list
    tokens: list
    block: list
    old: list
    new: list
    semaphores: Any
    state: Any

    @property
    def entries(self) -> int:
        """J."""
        return (self.table.shape[-1] - 2) // (1 + self.layout.block_size)

    def used(self, head) -> Int[Array, ""]:
        """Entries up to the last one that stores something."""
        return self.table[0, head, 0, self.entries + 1]

    def source(self, place, slot: int):
        """The token for a slot of an entry, or -1."""
        (head, j), size = place, self.layout.block_size
        return self.table[0, head, 0, self.entries + 2 + j * size + slot]

    def start(self) -> None:
        """Start reading the first block."""
        for i in range(3):
            self.state[i] = 0
        entry = self.table[0, 0, 0, 0]
        pl.when(_kind(entry) == PARTIAL)(lambda: self._read(entry, 0))

    def store(self, head, which: int) -> None:
        """Store what the next head stores; `which`: its place among the tokens. Its last blocks may
        still be on their way."""

        def step(j, _):
            count = self.state[0]
            self.state[0] = count + 1
            self._step(which, (head, j), jax.lax.rem(count, 2))
            return 0

        # one step for an empty head, too, which reads the next one's first block
        jax.lax.fori_loop(0, jnp.maximum(self.used(head), 1), step, 0)

    def _following(self, head, j):
        """The entry after this one, or an empty one."""
        same = j + 1 < self.used(head)
        head, j = jnp.where(same, head, head + 1), jnp.where(same, j + 1, 0)
        last = self.table.shape[1] - 1
        return jnp.where(head <= last, self.table[0, jnp.minimum(head, last), 0, j], EMPTY)

    def _step(self, which: int, place, new) -> None:
        """Put the block of an entry together and start storing it. new: which of two buffers."""
        entry, following = self.table[0, place[0], 0, place[1]], self._following(*place)
        self.wait_stored(new)  # before its memory takes the new block
        reads, free = _kind(following) == PARTIAL, self._is_stored(following, entry, new)
        pl.when(reads & free)(lambda: self._read(following, 1 - new))
        kind = _kind(entry)
        pl.when(kind == PARTIAL)(lambda: self._unpack_old(entry, new, which))
        pl.when(kind == CONSECUTIVE)(lambda: self._pick_run(which, place))
        pl.when((kind == PARTIAL) | (kind == FULL))(lambda: self._pick_rows(which, place))
        pl.when(kind > EMPTY)(lambda: self._store(entry, new))

        @pl.when(reads & ~free)
        def _():
            for buffer in range(2):
                self.wait_stored(buffer)
            self._read(following, 1 - new)

    def _is_stored(self, following, entry, new):
        """Whether the next block can be read while this one is put together: heads share blocks,
        and it may be this one, or the last one, which is still on its way out."""
        block = following >> KIND_BITS
        return (block != entry >> KIND_BITS) & (block + 1 != self.state[2 - new])

    def _read(self, entry, buffer) -> None:
        for copy in self._copies(entry >> KIND_BITS, buffer, reads=True):
            copy.start()

    def wait_stored(self, buffer) -> None:
        """Until what a new block held is in the pool, if it is being stored."""
        block = self.state[1 + buffer] - 1

        # a wait for a store that was not started would never end
        @pl.when(block >= 0)
        def _():
            for copy in self._copies(block, buffer, reads=False):
                copy.wait()
            self.state[1 + buffer] = 0

    def _copies(self, block, buffer, reads: bool):
        # A wait has to name the same copies as their start: both come from here.
        semaphore = self.semaphores.at[0 if reads else 1, buffer]
        for pool, here in zip(self.pools, self.old if reads else self.new, strict=True):
            ends = (block_of(pool, self.row, block), here.at[buffer])
            yield pltpu.make_async_copy(*(ends if reads else ends[::-1]), semaphore)

    def _unpack_old(self, entry, buffer, which: int) -> None:
        for copy in self._copies(entry >> KIND_BITS, buffer, reads=True):
            copy.wait()
        size = self.layout.block_size
        # one place for all old blocks: the rows that the step before kept are picked already
        behind = pl.ds(self.tokens[0].shape[1] - size, size)
        values = self.layout.cut(self.old[0][buffer].astype(jnp.float32))
        for part, new in zip(self.tokens, values, strict=False):
            part[which, behind] = new
        if self.layout.scaled:
            scales = jnp.broadcast_to(self.old[1][buffer], (size, 2 * size))
            self.tokens[-1][which, behind] = scales

    def _pick_run(self, which: int, place) -> None:
        first = self.source(place, 0)
        for block, tokens in zip(self.block, self.tokens, strict=True):
            block[...] = tokens[which, pl.ds(first, self.layout.block_size)]

    def _pick_rows(self, which: int, place) -> None:
        size = self.layout.block_size
        behind = self.tokens[0].shape[1] - size
        for i in range(size):
            source = self.source(place, i)
            row = jnp.where(source < 0, behind + i, source)
            for block, tokens in zip(self.block, self.tokens, strict=True):
                block[pl.ds(i, 1)] = tokens[which, pl.ds(row, 1)]

    def _store(self, entry, buffer) -> None:
        size = self.layout.block_size
        # float32 holds old contents exactly (int8: whole numbers), so storing them again changes
        # nothing; only new tokens of a wider type than the pool's are rounded.
        values = [part[...] for part in self.block[: self.layout.values]]
        self.new[0][buffer] = jnp.concatenate(values, axis=-1).astype(self.new[0].dtype)
        if self.layout.scaled:
            # slot i's scales are lanes i and block_size + i of row i; an old row holds all of them
            scales = self.block[-1][...]
            lane = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 1)
            slot = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 0)
            own = (lane == slot) | (lane == slot + size)
            self.new[1][buffer] = jnp.where(own, scales, 0.0).sum(axis=0, keepdims=True)
        block = entry >> KIND_BITS
        for copy in self._copies(block, buffer, reads=False):
            copy.start()
        self.state[1 + buffer] = block + 1


def _kind(entry):
    return entry & (2**KIND_BITS - 1)
