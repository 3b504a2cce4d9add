"""Tables of the slots that a head may read, and of the slot that each token of a scale goes
into."""

from dataclasses import dataclass, field, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

AnyArray = Array | np.ndarray  # the planner's tables are made on the host
EMPTY, PARTIAL, FULL, CONSECUTIVE = range(4)  # kinds of entries of a write, in the low bits
KIND_BITS = 2  # beside the id
RANGE_BITS = 16  # start below, stop above; both are at most 256, so the sign stays clear
WORD = 32  # entries that one number says of which are partial
RUN, TILE = 8, 64  # tokens that are stored together, if their slots are; of which a tile has many


class OfLayers:
    """Tables of one layer or of all."""

    def of_layer(self, layer: Int[AnyArray, ""]) -> Self:
        """The table of one layer, from a table of all layers; nothing is copied."""
        return replace(self, layer=layer)

    def sliced(self) -> Self:
        """The table of its layer alone; the other layers are cut off."""
        if self.layer is None:
            return self
        layer = jnp.asarray(self.layer)  # NumPy's arrays cannot be indexed by a traced number
        return jax.tree.map(lambda a: jnp.asarray(a)[layer], replace(self, layer=None))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTable(OfLayers):
    """Runs of slots: entry m of head n covers slots [start, stop) of block `ids`. start == stop is
    an empty entry.

    Arrays are int32 [N, M] (all rows alike), [R, N, M] (per row) or, with `layer`, [L, N, M] (all
    layers, all rows alike; kernels read one layer). Ids are global in the row's pool and always
    valid, also in empty entries. A block may be listed twice with disjoint ranges.

    packed: the same numbers with one row per head, as TPU and Mosaic kernels read them: the ids,
      then start + 2**16 stop of every entry (0: empty), then how many entries are in use, then a
      bit per entry, `WORD` of them in a number: 1 where not every slot of its block is valid, and
      behind the last entry. Kernels pack a table that is not packed. Pack a table that a loop does
      not change before the loop, once for all layers.
    finite: static, whether every slot of the pool and every token of the projection holds finite
      numbers, those that are not listed and padding, too. Kernels may then multiply them by 0.
    """

    # Valid also where empty: the reference gathers every entry, and the TPU kernels copy the blocks
    # of all entries up to the last one in use.
    ids: Int[AnyArray, "*rows N M"]
    start: Int[AnyArray, "*rows N M"]
    stop: Int[AnyArray, "*rows N M"]
    layer: Int[AnyArray, ""] | None = None
    packed: Int[AnyArray, "*rows N 1 packed"] | None = None
    finite: bool = field(default=False, metadata=dict(static=True))

    def with_packed(self, block_size: int) -> "BlockTable":
        """The same table with `packed` filled in."""
        if self.packed is not None:
            return self
        # an entry in use has stop > 0, so its range is never 0, and 0 means an empty one
        ranges = jnp.where(self.stop > self.start, self.start | self.stop << RANGE_BITS, 0)
        partial = _bits((self.stop - self.start) < block_size)
        packed = jnp.concatenate([self.ids, ranges, _in_use(ranges > 0), partial], axis=-1)
        return replace(self, packed=packed.astype(jnp.int32)[..., None, :])

    def _offsets(self, block_size: int) -> Int[Array, "*rows N M block_size"]:
        """The place within its block, for every slot of every entry."""
        shape = (*self.ids.shape, block_size)
        return jax.lax.broadcasted_iota(self.ids.dtype, shape, self.ids.ndim)

    def with_rows(self) -> tuple[Array, Array, Array]:
        """(ids, start, stop), each [R, N, M], or [1, N, M] if the table is shared by all rows."""
        here = self.sliced()
        return tuple(a if a.ndim == 3 else a[None] for a in (here.ids, here.start, here.stop))

    def slot_mask(self, block_size: int) -> Bool[Array, "*rows N P"]:
        """Valid slots in table order; P = M * block_size."""
        here = self.sliced()
        offset = here._offsets(block_size)
        mask = (offset >= here.start[..., None]) & (offset < here.stop[..., None])
        return mask.reshape(*here.ids.shape[:-1], -1)

    def slots(self, block_size: int) -> Int[Array, "*rows N P"]:
        """Slot numbers (block id * block_size + offset) in table order, valid or not."""
        here = self.sliced()
        slots = here.ids[..., None] * block_size + here._offsets(block_size)
        return slots.reshape(*here.ids.shape[:-1], -1)

    def for_rows(self, regions: Int[Array, "R N"]) -> "BlockTable":
        """Per-row tables where head n of row r reads the entries listed for region `regions[r,
        n]`."""
        return jax.tree.map(lambda a: a[regions], self.sliced())

    def filled_to(self, count: Int[Array, "*rows N"]) -> "BlockTable":
        """The same runs, cut so that only the first `count` slots in table order are valid. The
        result has no `layer`."""
        length = self.stop - self.start
        before = jnp.cumsum(length, axis=-1) - length
        left = jnp.clip(count[..., None] - before, 0, length)  # 0 behind the last run in use
        stop = (self.start + left).astype(self.stop.dtype)
        return replace(self, stop=stop, layer=None, packed=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWrites(OfLayers):
    """Blocks that receive tokens: slot i of entry j of head n takes token `source[n, j, i]` of the
    scale; -1 leaves the slot as it is.

    Arrays are int32, with the leading axes of `BlockTable`. No head lists a block twice, because
    kernels read a block while another one is written. Several heads may list the same block, each
    for other slots of it. An entry whose sources are all -1 is empty: its id may be any valid one,
    and its block is not touched.

    packed: the same numbers with one row per head, as in `BlockTable`: id and kind of every entry,
      an empty entry, how many entries are in use, the sources of all entries.
    by_token: the same from the tokens' side, for a kernel that stores them as it finishes them, or
      None (`slots_by_token`).
    """

    ids: Int[AnyArray, "*rows N J"]
    source: Int[AnyArray, "*rows N J block_size"]
    layer: Int[AnyArray, ""] | None = None
    packed: Int[AnyArray, "*rows N 1 packed"] | None = None
    by_token: Int[AnyArray, "*rows N by_token"] | None = None

    def with_packed(self) -> "BlockWrites":
        """The same table with `packed` filled in."""
        if self.packed is not None:
            return self
        source, ids = jnp.asarray(self.source), jnp.asarray(self.ids)
        stored, slot = source >= 0, jnp.arange(source.shape[-1], dtype=jnp.int32)
        # A full block needs no read of what it held; a run of tokens is one load, not one per slot.
        run = (source == source[..., :1] + slot).all(-1)
        kind = jnp.where(stored.any(-1), PARTIAL, EMPTY)
        kind = jnp.where(stored.all(-1), jnp.where(run, CONSECUTIVE, FULL), kind)
        used = _in_use(kind > EMPTY)
        # a head without entries still has this empty one to read
        parts = [ids << KIND_BITS | kind, jnp.zeros_like(used), used]
        flat = source.reshape(*ids.shape[:-1], ids.shape[-1] * source.shape[-1])
        packed = jnp.concatenate([*parts, flat], axis=-1)
        return replace(self, packed=packed.astype(jnp.int32)[..., None, :])

    @property
    def slots(self) -> Int[Array, "*rows N JS"]:
        """Slot numbers of all listed blocks, in table order; JS = J * block_size."""
        here, size = self.sliced(), self.source.shape[-1]
        slots = here.ids[..., None] * size + jnp.arange(size, dtype=here.ids.dtype)
        return slots.reshape(*here.ids.shape[:-1], -1)


def _in_use(entries: Bool[Array, "*rows N M"]) -> Int[Array, "*rows N 1"]:
    """The number of entries up to the last one that is not empty."""
    entry = jax.lax.broadcasted_iota(jnp.int32, entries.shape, entries.ndim - 1)
    return jnp.where(entries, entry + 1, 0).max(-1, keepdims=True, initial=0)


def _bits(entries: Bool[AnyArray, "*rows N M"]) -> Int[Array, "*rows N words"]:
    """A bit per entry, the first one lowest; ones behind the last, in at least one number."""
    count = entries.shape[-1]
    widths = [(0, 0)] * (entries.ndim - 1) + [(0, max(1, -(-count // WORD)) * WORD - count)]
    filled = jnp.pad(jnp.asarray(entries), widths, constant_values=True)
    places = filled.reshape(*entries.shape[:-1], -1, WORD)
    # the highest bit is the sign: sums wrap around to it
    values = jnp.left_shift(jnp.int32(1), jnp.arange(WORD, dtype=jnp.int32))
    return jnp.where(places, values, 0).sum(-1, dtype=jnp.int32)


def block_writes(slots: np.ndarray, block_size: int, entries: int | None = None) -> BlockWrites:
    """The table of host arrays that stores token t of a head in slot `slots[..., t]`.

    Args:
      slots: int [..., T], slot numbers of the pool; negative: the token is not stored.
      entries: J; None takes what the fullest head needs (at least 1).
    """
    lead, flat = slots.shape[:-1], slots.reshape(-1, slots.shape[-1])
    # `BlockWrites` wants each block once, however its tokens are spread
    blocks = [np.unique(s[s >= 0] // block_size, return_inverse=True) for s in flat]
    if entries is None:
        entries = max((1, *(len(listed) for listed, _ in blocks)))
    # unused entries: any valid id, here 0, without a token
    ids = np.zeros((len(flat), entries), np.int32)
    source = np.full((len(flat), entries, block_size), -1, np.int32)
    for n, (listed, entry) in enumerate(blocks):
        ids[n, : len(listed)] = listed
        tokens = np.flatnonzero(flat[n] >= 0)
        source[n, entry, flat[n, tokens] % block_size] = tokens
    ids, source = ids.reshape(*lead, entries), source.reshape(*lead, entries, block_size)
    return BlockWrites(ids, source, by_token=slots_by_token(slots))


def slots_by_token(slots: np.ndarray) -> np.ndarray:
    """`BlockWrites.by_token` of host arrays: int32 [..., T' / RUN + T'], T' = T in whole tiles.

    For every `RUN` tokens first their first slot and kind: EMPTY, CONSECUTIVE (all of them go into
    slots that follow one another) or PARTIAL (all others). Then the slot of every token, -1 where
    it is not stored.

    Args:
      slots: as `block_writes` takes them.
    """
    lead, tokens = slots.shape[:-1], slots.shape[-1]
    flat = np.full((*lead, -(-tokens // TILE) * TILE), -1, np.int32)
    flat[..., :tokens] = np.maximum(slots, -1)
    runs = flat.reshape(*lead, -1, RUN)
    first = runs[..., 0]
    kind = np.where((runs >= 0).any(-1), PARTIAL, EMPTY)
    whole = (first >= 0) & (runs == first[..., None] + np.arange(RUN)).all(-1)
    kind = np.where(whole, CONSECUTIVE, kind)
    words = np.maximum(first, 0) << KIND_BITS | kind
    return np.concatenate([words, flat], axis=-1, dtype=np.int32)
