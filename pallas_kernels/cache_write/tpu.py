"""Storing tokens in the pool on TPU (Mosaic): whole blocks are read, changed and written back.

HBM holds blocks in tiles, and a single bfloat16 or int8 row of a tile cannot be written. So for all
heads of a grid step the kernel walks over the blocks that receive tokens. While one block is put
together, the old contents of the next one are on their way in and the new contents of the last one
on their way out. Heads of a row may share a block. A block that is still on its way out is waited
for before it is read again, and heads of a row run one after the other on one core.

Keys and values are finished and written to vector memory as float32 rows, because single float32
rows can be addressed there. Key and value of a head lie side by side as in the pool. The old
contents of the block lie behind the tokens, and a slot that keeps its token names its row there.
float32 holds bfloat16 and int8 exactly, and rows are only moved from there on, so other rows do not
matter even if they hold NaN. An int8 pool's scales are lanes beside the rows.

HBM traffic in bytes, with e and b bytes per element of tokens and pool, S = block_size, and for
each head J blocks that are written, J_p of which are partly overwritten:

    R N (2 T H e + (J_p + J) 2 H S b), int8: + R N (J_p + J) 4 max(128, 2 S) for scales

Vector memory: 4 (T + S) 2 H for the tokens of each head of a group, and the tokens of the heads of
a grid step in their own type twice.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import estimates
from pallas_kernels.cache_write.reference import LARGEST_INT8, inverse_scale
from pallas_kernels.refs import Ref, Scalar
from pallas_kernels.shared import tpu_operands
from pallas_kernels.shared.tpu_operands import (
    BLOCK_SIZES,
    LANES,
    block_of,
    block_shape,
    in_parts,
    rounded,
)
from pallas_kernels.shared.tpu_projection import HeadGroups, OwnTokens, operands
from pallas_kernels.tables import CONSECUTIVE, EMPTY, FULL, KIND_BITS, PARTIAL

CHUNK = 128  # tokens that are converted at once
KINDS = 2**KIND_BITS - 1  # the bits of an entry that are its kind


@dataclass(frozen=True)
class TokenLanes:
    """Layout of a token's numbers in the lanes of vector memory: parts of at most 128 lanes,
    because only such arrays can be read from any row on.

    parts: widths. The last part holds scales if `scaled`: the key's in the first half of its lanes,
    the value's in the second.
    """

    block_size: int
    parts: tuple[int, ...]
    scaled: bool

    @classmethod
    def of(cls, head_dim: int, block_size: int, scaled: bool) -> "TokenLanes":
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


def write(kv_pool, projection, writes, kv_scale, *, interpret: bool, after=None):
    """See `api.write`. XLA's TPU compiler needs no `after`.

    No head may store into a block by two entries, because the next block is read before the last
    one is written. Heads of a row follow each other, so they may share blocks.
    """
    if not interpret:
        _check(projection, kv_pool)
    if not kv_pool.size or not writes.source.size:
        return kv_pool, kv_scale  # there is no slot to fill
    tokens, head_dim = projection.shape[2:]
    chunk = min(CHUNK, rounded(tokens, 32))  # whole tiles: 8 rows of float32, 16 of bfloat16
    writes = writes.with_packed()
    heads = HeadGroups.of(projection, writes)
    table, table_spec = tpu_operands.table_rows(writes, heads)
    whole = (rounded(tokens, chunk), lambda *_: 0)
    given = operands(projection, heads, {"k": whole, "v": whole})
    pools = tpu_operands.pools(kv_pool, kv_scale, interpret)
    lanes = TokenLanes.of(head_dim, kv_pool.shape[2], kv_scale is not None)
    found = pl.pallas_call(
        partial(
            _kernel,
            lanes=lanes,
            heads=heads,
            chunk=chunk,
            given=tuple(given),
            pools=len(pools),
            dtype=projection.dtype,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(kv_pool), heads.steps),
            in_specs=[
                table_spec,
                *[spec for _, spec in given.values()],
                *[tpu_operands.IN_PLACE] * len(pools),
            ],
            out_specs=[tpu_operands.IN_PLACE] * len(pools),
            scratch_shapes=_scratch_shapes(lanes, heads, pools, whole[0]),
        ),
        out_shape=[jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools],
        # Operands behind the layer, the table and the tokens. Blocks that are not written keep
        # their contents only because a result is its operand.
        input_output_aliases={2 + len(given) + i: i for i in range(len(pools))},
        # heads may share blocks, rows do not
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_vmem_limit(lanes, heads, whole[0], projection),
        ),
        cost_estimate=estimates.write(
            projection, kv_pool, writes, blocks=True, scales_at_once=LANES
        ),
        interpret=interpret,
        name="cache_write",
    )(tpu_operands.layer_of(writes), table, *(array for array, _ in given.values()), *pools)
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
    # a block's scales, two per slot, are one row of a part of at most 128 lanes (see `TokenLanes`)
    largest = LANES // 2 if kv_pool.dtype == jnp.int8 else LANES
    if block_size not in BLOCK_SIZES or block_size > largest:
        raise NotImplementedError(
            f"storing on TPU takes blocks of 8, 16, ... {largest} slots in a pool of "
            f"{kv_pool.dtype}, not {block_size}: plan with one of them (policy argument "
            f"block_size) or {way_out}"
        )


# --- vector memory ---


def _scratch_shapes(lanes: TokenLanes, heads: HeadGroups, pools: list[Array], padded: int) -> list:
    """Scratch memory: tokens of the heads at work, by part; a block, by part; two old and two new
    blocks (pool and scales); semaphores [old or new, which of the two]; counters."""
    # two old and two new blocks: one is on its way while the other is used
    blocks = [pltpu.VMEM((2, *block_shape(pool)), pool.dtype) for pool in pools]
    tokens = (heads.together, padded + lanes.block_size)
    return [
        *[pltpu.VMEM((*tokens, w), jnp.float32) for w in lanes.parts],
        *[pltpu.VMEM((lanes.block_size, w), jnp.float32) for w in lanes.parts],
        *blocks,
        *blocks,
        # one for each block: the arrival of another block must not end a wait
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.SMEM((3,), jnp.int32),
    ]


def _vmem_limit(lanes: TokenLanes, heads: HeadGroups, padded: int, projection) -> int | None:
    """Bytes of vector memory that the kernel asks for; None where the default of 16 MiB will do."""
    row = heads.together * sum(rounded(width, LANES) for width in lanes.parts)
    given = 4 * heads.groups * rounded(heads.width, LANES) * projection.dtype.itemsize
    rotation = 0 if projection.rotation is None else 4 * rounded(heads.width, LANES)
    # 1 MiB is for the blocks. This is an estimate, so 2 of the 16 MiB stay free, and a limit that
    # has to be named is a quarter larger.
    needed = padded * (4 * row + given + rotation) + 2**20
    return None if needed <= 14 * 2**20 else needed * 5 // 4


# --- the kernel ---


def _kernel(_, table, *refs, lanes, heads: HeadGroups, chunk: int, given, pools: int, dtype):
    parts = len(lanes.parts)
    # pools as operands are not used: they are the same memory as the results
    own, _, *state = in_parts(refs, len(given), pools, pools, parts, parts, pools, pools, 2)
    own = OwnTokens.of(heads, 1.0, dict(zip(given, own, strict=True)))
    entries = (table.shape[-1] - 2) // (1 + lanes.block_size)
    stores = StoredEntries(lanes, pl.program_id(0), entries, table, *state[:-1], *state[-1])
    stores.start()  # the first block is on its way while the tokens are converted

    def group(i):
        mine = [i * heads.together + which for which in range(heads.together)]

        convert = partial(_convert, own, i, stores.tokens, lanes, chunk, dtype)
        pl.when(sum(stores.used(head) for head in mine) > 0)(convert)
        for which, head in enumerate(mine):
            stores.store(head, which)

    heads.for_each_group(group)
    # No copy may outlive the grid step: the next one uses the same memory and semaphores, and may
    # read the same blocks.
    for which in range(2):
        stores.wait_stored(which)


def _convert(own: OwnTokens, group, tokens, lanes: TokenLanes, chunk: int, dtype) -> None:
    """Put the finished tokens of a group of heads into vector memory as rows of float32: for an
    int8 pool whole numbers and their scales."""

    def step(i, _):
        here = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        # Rows behind T are undefined (NaN perhaps) and converted all the same. No row mixes with
        # another, and no slot names these.
        k, v = own.keys(group, here), own.values(group, here)
        for which in range(own.heads.together):
            # rounded to the type of the tokens, as in the reference, whatever type the pool has
            kv = own.heads.side_by_side(k, v, which).astype(dtype).astype(jnp.float32)
            if lanes.scaled:
                kv, tokens[-1][which, here] = _quantized(kv, lanes.block_size)
            for part, values in zip(tokens, lanes.cut(kv), strict=False):
                part[which, here] = values
        return 0

    jax.lax.fori_loop(0, (tokens[0].shape[1] - lanes.block_size) // chunk, step, 0)


def _quantized(
    kv: Float[Array, "rows KV"], block_size: int
) -> tuple[Float[Array, "rows KV"], Float[Array, "rows two_block_size"]]:
    """Tokens as whole numbers, and their scales, the key's in the first half of the lanes, the
    value's in the second. The numbers are those of `reference.quantize`."""
    is_key = jax.lax.broadcasted_iota(jnp.int32, kv.shape, 1) < kv.shape[1] // 2
    size = jnp.abs(kv)
    k_scale, v_scale = (
        jnp.where(half, size, 0.0).max(axis=1, keepdims=True) / LARGEST_INT8
        for half in (is_key, ~is_key)
    )
    whole = jnp.round(kv * jnp.where(is_key, inverse_scale(k_scale), inverse_scale(v_scale)))
    of_key = jax.lax.broadcasted_iota(jnp.int32, (len(kv), 2 * block_size), 1) < block_size
    return whole, jnp.where(of_key, k_scale, v_scale)


# --- blocks that receive tokens ---


@dataclass(frozen=True)
class StoredEntries:
    """The entries of some heads of one row, which are stored in order. A block is read, put
    together and written back; the next one and the last one are on their way meanwhile.

    entries: J.
    table: `BlockWrites.packed` of these heads, in scalar memory.
    pools: whole, in HBM.
    tokens: tokens of the heads at work, with the old block behind them, by part.
    block: the block that is put together, by part.
    old, new: two old and two new blocks, as the pools hold them.
    state: in scalar memory, the number of entries so far, and for each of the two new blocks the
      number + 1 of the block that it is being stored to, or 0.
    """

    lanes: TokenLanes
    row: Scalar
    entries: int
    table: Ref
    pools: list[Ref]
    tokens: list[Ref]
    block: list[Ref]
    old: list[Ref]
    new: list[Ref]
    semaphores: Ref
    state: Ref

    def used(self, head) -> Int[Array, ""]:
        """The number of entries up to the last one that stores something."""
        return self.table[0, head, 0, self.entries + 1]

    def source(self, place, slot: int):
        """The token that a slot of an entry receives, or -1. place: (head, entry)."""
        (head, j), size = place, self.lanes.block_size
        return self.table[0, head, 0, self.entries + 2 + j * size + slot]

    def start(self) -> None:
        """Start reading the first block."""
        for i in range(3):
            self.state[i] = 0
        entry = self.table[0, 0, 0, 0]
        # only a partly overwritten block has contents that stay
        pl.when((entry & KINDS) == PARTIAL)(lambda: self._read(entry, 0))

    def store(self, head, which: int) -> None:
        """Store the tokens of the next head. Its last blocks may still be on their way afterwards.
        which: the head's place among `tokens`."""

        def step(j, _):
            count = self.state[0]
            self.state[0] = count + 1
            self._step(which, (head, j), jax.lax.rem(count, 2))
            return 0

        # an empty head makes one step, too, in which the first block of the next head is read
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
        reads, free = (following & KINDS) == PARTIAL, self._is_stored(following, entry, new)
        pl.when(reads & free)(lambda: self._read(following, 1 - new))
        kind = entry & KINDS
        pl.when(kind == PARTIAL)(lambda: self._unpack_old(entry, new, which))
        pl.when(kind == CONSECUTIVE)(lambda: self._pick(which, self.source(place, 0)))

        @pl.when((kind == PARTIAL) | (kind == FULL))
        def _():
            size = self.lanes.block_size
            behind = self.tokens[0].shape[1] - size
            for i in range(size):
                source = self.source(place, i)
                # a slot without a token keeps its row
                self._pick(which, jnp.where(source < 0, behind + i, source), i)

        pl.when(kind > EMPTY)(lambda: self._store(entry, new))

        # a block that is shared with the entries before is read once these are stored
        @pl.when(reads & ~free)
        def _():
            for buffer in range(2):
                self.wait_stored(buffer)
            self._read(following, 1 - new)

    def _is_stored(self, following, entry, new):
        """Whether the next block can be read while this one is put together. Heads share blocks, so
        the next block may be this one, or the last one, which is still on its way out."""
        block = following >> KIND_BITS
        # state[2 - new] belongs to the other new block, the one that was stored last
        return (block != entry >> KIND_BITS) & (block + 1 != self.state[2 - new])

    def _read(self, entry, buffer) -> None:
        for copy in self._copies(entry >> KIND_BITS, buffer, reads=True):
            copy.start()

    def wait_stored(self, buffer) -> None:
        """Wait until a new block is in the pool, if it is being stored."""
        block = self.state[1 + buffer] - 1

        # a wait for a store that was not started would never end
        @pl.when(block >= 0)
        def _():
            for copy in self._copies(block, buffer, reads=False):
                copy.wait()
            self.state[1 + buffer] = 0

    def _copies(self, block, buffer, reads: bool):
        # a wait has to name the same copies as their start, so both come from here
        semaphore = self.semaphores.at[0 if reads else 1, buffer]
        for pool, here in zip(self.pools, self.old if reads else self.new, strict=True):
            ends = (block_of(pool, self.row, block), here.at[buffer])
            yield pltpu.make_async_copy(*(ends if reads else ends[::-1]), semaphore)

    def _unpack_old(self, entry, buffer, which: int) -> None:
        for copy in self._copies(entry >> KIND_BITS, buffer, reads=True):
            copy.wait()
        size = self.lanes.block_size
        # one place is enough for all old blocks: the step before has picked its rows already
        behind = pl.ds(self.tokens[0].shape[1] - size, size)
        values = self.lanes.cut(self.old[0][buffer].astype(jnp.float32))
        for part, new in zip(self.tokens, values, strict=False):
            part[which, behind] = new
        if self.lanes.scaled:
            scales = jnp.broadcast_to(self.old[1][buffer], (size, 2 * size))
            self.tokens[-1][which, behind] = scales

    def _pick(self, which: int, first, slot: int | None = None) -> None:
        """Put the token `first` into a slot of the block, or a run of them into all of it: one load
        per part, where rows one by one would be block_size loads."""
        here, size = (..., self.lanes.block_size) if slot is None else (pl.ds(slot, 1), 1)
        for block, tokens in zip(self.block, self.tokens, strict=True):
            block[here] = tokens[which, pl.ds(first, size)]

    def _store(self, entry, buffer) -> None:
        size = self.lanes.block_size
        # float32 holds old contents exactly (int8: whole numbers), so storing them again changes
        # nothing. Only new tokens of a wider type than the pool's are rounded.
        values = [part[...] for part in self.block[: self.lanes.values]]
        self.new[0][buffer] = jnp.concatenate(values, axis=-1).astype(self.new[0].dtype)
        if self.lanes.scaled:
            # Lanes i and block_size + i of row i are slot i's scales. An old row holds the scales
            # of all slots, a new row repeats its own.
            scales = self.block[-1][...]
            lane = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 1)
            slot = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 0)
            own = (lane == slot) | (lane == slot + size)
            self.new[1][buffer] = jnp.where(own, scales, 0.0).sum(axis=0, keepdims=True)
        block = entry >> KIND_BITS
        for copy in self._copies(block, buffer, reads=False):
            copy.start()
        self.state[1 + buffer] = block + 1
