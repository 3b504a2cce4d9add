"""Arithmetic of a row in the TPU kernels of token attention: between its queries [G N, W] and the
slots of some of its heads. A matrix has a line for every query head, G neighbouring lines for each
head of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_attention.reference import dot
from pallas_kernels.shared.tpu_operands import LANES


def iota(shape: tuple[int, int], axis: int):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


class Lines(NamedTuple):
    """Assignment of the lines of a row's matrices to heads.

    number: of every line, int32 [G N, 1]. group: lines of a head, G.
    """

    number: jax.Array
    group: int

    @classmethod
    def of(cls, queries: int, group: int) -> "Lines":
        """queries: G N."""
        return cls(iota((queries, 1), 0), group)

    def head(self, head):
        """A mask [G N, 1] of the lines of a head."""
        return self.number == head if self.group == 1 else self.between(head, head + 1)

    def between(self, first, last):
        """A mask [G N, 1] of the lines of heads from number `first` on, `last` not included."""
        if self.group > 1:
            first, last = self.group * first, self.group * last
        return (self.number >= first) & (self.number < last)

    def spread(self, array):
        """Lines of query heads from those of heads [N, C]; one line that all share stays one."""
        if self.group == 1 or len(array) == 1:
            return array
        # selected line by line: lines cannot be repeated at any place of a tile
        found = jnp.broadcast_to(array[:1], (len(self.number), array.shape[1]))
        for head in range(1, len(array)):
            found = jnp.where(self.head(head), array[head : head + 1], found)
        return found

    def gathered(self, array):
        """Sums over the lines of every head [N, C]: the inverse of `spread`."""
        if self.group == 1:
            return array
        heads = len(array) // self.group
        number = iota((heads, 1), 0)
        found = jnp.zeros((heads, array.shape[1]), array.dtype)
        for head in range(heads):
            total = jnp.where(self.head(head), array, 0).sum(axis=0, keepdims=True)
            found = jnp.where(number == head, total, found)
        return found


def padded(q, width: int):
    """Queries [N, W] from [N, H]: with zeros where values lie if slots are not taken apart."""
    size = q.shape[1]
    if columns(size, width) == size:
        return q
    return jnp.concatenate([q, jnp.zeros((len(q), width - size), q.dtype)], axis=1)


def columns(size: int, width: int) -> int:
    """Number of the pool's `width` columns, the last ones, that a sum of values has; `size`: of a
    head."""
    # keys and values are taken apart only where a half is a whole number of lanes
    return size if size % LANES == 0 else width


def scores(queries, mine, pool):
    """Scores [N, C] of every query with the slots of its head; 0 for heads that are not here.

    mine: for each head that is here, a mask [N, 1] of its row.
    pool: [heads, C, 2 H], the slots of these heads.
    """
    dtype = queries.dtype
    if pool.dtype != jnp.int8:  # whole numbers up to 127 are exact in any type of queries
        dtype = jnp.promote_types(pool.dtype, dtype)
    found = jnp.zeros((len(queries), pool.shape[1]), jnp.float32)
    for j, own in enumerate(mine):
        # products of all queries with one head's slots, of which the head's own line is kept
        keys = pool.at[j][:, : queries.shape[1]].astype(dtype)
        found = jnp.where(own, dot(queries.astype(dtype), keys, (1, 1)), found)
    return found


def mean(weights, mine, pool, dtype, width: int):
    """Weighted sums [N, W] of the last W columns, for every head from its own slots.

    weights: [N, C]. mine, pool: as in `scores`. dtype: of the queries. width: W.
    """
    if pool.dtype != jnp.int8:  # as in `scores`
        dtype = jnp.promote_types(pool.dtype, dtype)

    def sums(finite: bool):
        out = jnp.zeros((len(weights), width), jnp.float32)
        for j, own in enumerate(mine):
            values = pool[j, :, pool.shape[2] - width :]
            if finite:  # NaN compares false, so it is left out as infinity is
                values = values.astype(jnp.float32)
                values = jnp.where(jnp.abs(values) < jnp.inf, values, 0.0)
            # rows of other heads add 0, so `out` collects each head's row from its own slots
            out += dot(jnp.where(own, weights, 0.0).astype(dtype), values.astype(dtype), (1, 0))
        return out

    out = sums(False)
    if pool.dtype == jnp.int8:  # whole numbers are finite
        return out
    # seldom: pools begin with zeros, and tokens are finite
    return jax.lax.cond(spoilt(out), lambda: sums(True), lambda: out)


def spoilt(out):
    """Whether a number is not finite: a weight of 0 has met such a value."""
    return jnp.where(jnp.abs(out) < jnp.inf, 0.0, 1.0).max() > 0
