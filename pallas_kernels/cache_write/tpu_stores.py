"""Blocks that receive tokens, inside the TPU kernel. A block is read, put together and written
back; the next one and the last one are on their way meanwhile."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.refs import Ref, Scalar
from pallas_kernels.tables import CONSECUTIVE, EMPTY, FULL, KIND_BITS, PARTIAL
from pallas_kernels.tpu_operands import LANES, block_of


@dataclass(frozen=True)
class TokenLanes:
    """How the numbers of a token lie in the lanes of vector memory: cut into parts of at most 128
    lanes, because only such arrays can be read from any row on.

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


@dataclass(frozen=True)
class Stores:
    """The entries of some heads of one row, which are stored in order.

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
    table: Ref
    pools: list[Ref]
    tokens: list[Ref]
    block: list[Ref]
    old: list[Ref]
    new: list[Ref]
    semaphores: Ref
    state: Ref

    @property
    def entries(self) -> int:
        """J."""
        return (self.table.shape[-1] - 2) // (1 + self.lanes.block_size)

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
        pl.when(_kind(entry) == PARTIAL)(lambda: self._read(entry, 0))

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
        reads, free = _kind(following) == PARTIAL, self._is_stored(following, entry, new)
        pl.when(reads & free)(lambda: self._read(following, 1 - new))
        kind = _kind(entry)
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


def _kind(entry):
    return entry & (2**KIND_BITS - 1)
