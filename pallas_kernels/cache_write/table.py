"""Which token goes into which slot of the pool."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWrites:
    """Blocks that receive tokens: slot i of entry j of head n takes token `source[n, j, i]` of the
    scale; -1 leaves the slot as it is.

    Arrays are int32, for all rows alike or per row. No block is listed twice in a row, neither by
    one head nor by two: kernels read a block while another one is written. An entry whose sources
    are all -1 is empty: its id may be anything valid, and its block is not touched.
    """

    ids: Int[Array | np.ndarray, "*rows N J"]
    source: Int[Array | np.ndarray, "*rows N J block_size"]

    @property
    def slots(self) -> Int[Array, "*rows N JS"]:
        """Slot numbers of all listed blocks, in table order."""
        size = self.source.shape[-1]
        slots = self.ids[..., None] * size + jnp.arange(size, dtype=self.ids.dtype)
        return slots.reshape(*self.ids.shape[:-1], -1)


def block_writes(slots: np.ndarray, block_size: int, entries: int | None = None) -> BlockWrites:
    """The table (host arrays) that stores token t of a head in slot `slots[..., t]`.

    Args:
      slots: int [..., T], slot numbers of the pool; negative: the token is not stored.
      entries: J; None takes what the fullest head needs (at least 1).
    """
    lead, flat = slots.shape[:-1], slots.reshape(-1, slots.shape[-1])
    heads = [_one_head(s, block_size) for s in flat]
    needed = max((len(ids) for ids, _ in heads), default=1)
    entries = max(1, needed) if entries is None else entries
    # unused entries: any valid id, here 0, without a token
    ids = np.zeros((len(heads), entries), np.int32)
    source = np.full((len(heads), entries, block_size), -1, np.int32)
    for n, (mine, tokens) in enumerate(heads):
        ids[n, : len(mine)], source[n, : len(mine)] = mine, tokens
    return BlockWrites(ids.reshape(*lead, entries), source.reshape(*lead, entries, block_size))


def _one_head(slots: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(block ids [J], sources [J, block_size]) of one head's tokens."""
    tokens = np.flatnonzero(slots >= 0)
    stored = slots[tokens]
    # each block once, however its tokens are spread: the contract of `BlockWrites`
    ids, entry = np.unique(stored // block_size, return_inverse=True)
    source = np.full((len(ids), block_size), -1, np.int32)
    source[entry, stored % block_size] = tokens
    return ids, source
