"""Operands of token attention: the slots of a layer's heads, a query, and a token to store.

The cache of a layer, every implementation, tests and benchmark use the same classes.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.implementations import require


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadSlots:
    """The slots of all heads of one layer, and what is known about every slot.

    R rows, M heads with keys and values, C slots per head, KV = 2 H. All heads of a layer have
    equally many slots, so a layer's pool is one array and needs no table. In a kernel the fields
    are references to these arrays.

    pool: K in the first half of the last axis, V in the second. Empty slots may hold anything, NaN
      included.
    position: int32, the position of the token in every slot, -1: empty. An axis of 1 means that all
      rows, or all heads, share their positions. None: for operations that ask for no positions.
    scale: float32, for an int8 pool only: the factor of every slot's key, then of its value.
    mass: float32, sums of attention weights per slot; None: nobody asks for them.
    reach: int32, how many positions a head sees, counted back from the newest, at least 1; None:
      all.
    used: int32 scalar, at least 1: slots from this number on are empty in every row and head. A
      kernel may leave them unread. None: all slots may hold something.
    scores: float32, where the scores of a `Probe` go; None: nobody asks for them.
    """

    pool: Num[Array, "R M C KV"]
    position: Int[Array, "#R #M C"] | None = None
    scale: Float[Array, "R 2 M C"] | None = None
    mass: Float[Array, "R M C"] | None = None
    reach: Int[Array, "R M"] | None = None
    used: Int[Array, ""] | None = None
    scores: Float[Array, "R M C"] | None = None

    def group_size(self, queries: Num[Array, "R GM *rest"]) -> int:
        """Number of query heads that share a head of keys and values.

        Raises:
          ValueError: the query heads are no multiple of the heads of the pool.
        """
        heads = self.pool.shape[1]
        # at least one: fewer query heads than heads of the pool are refused as well
        group, rest = divmod(queries.shape[1], heads)
        if rest or not group:
            raise ValueError(
                f"{queries.shape[1]} query heads cannot share {heads} heads of keys and values: "
                f"their number has to be a multiple"
            )
        return group


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Probe:
    """A second query of every head, whose scores with the slots are asked for while these are there
    anyway: scores before the softmax, of all slots, whatever empty ones hold.

    total: float32, finite: a sum of queries. count: static, of how many: the scores are those of
    their mean. wanted: whether this call is asked; where it is not, the scores may be anything
    afterwards. every: static, one call in so many is asked (for estimates).
    """

    total: Float[Array, "R M H"]
    wanted: Bool[Array, ""] | None
    count: int = field(default=1, metadata=dict(static=True))
    every: int = field(default=1, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Query:
    """The queries of one token of every row, and what holds for all of its heads.

    q: finished queries (rotated, with the attention scale). With groups there are G M query heads;
      query head i reads the keys and values of head i // G.
    newest: int32 scalar, the largest position that is seen, which is the query's own; None: all are
      seen. So the positions of tokens to come may be written beforehand.
    first_bias: float32, added to the score of slot 0.
    mass_weight: factor of this query's attention weights in the sums `HeadSlots.mass`.
    protected: static; positions below it are seen whatever `HeadSlots.reach` says.
    probe: for `store_and_attend` with `HeadSlots.scores` only.
    """

    q: Float[Array, "R GM H"]
    newest: Int[Array, ""] | None = None
    first_bias: Float[Array, " R"] | None = None
    mass_weight: Float[Array, ""] | float | None = 1.0
    protected: int = field(default=0, metadata=dict(static=True))
    probe: Probe | None = None


class NewToken(NamedTuple):
    """Key and value of one token of every row, finished as the pool holds them, and the slot they
    go to in all rows and heads. An int8 pool stores them as `cache_write.write` does."""

    k: Float[Array, "R M H"]
    v: Float[Array, "R M H"]
    slot: Int[Array, ""]


def visible(
    position: Int[Array, "..."],
    newest: Int[Array, "..."] | None,
    reach: Int[Array, "..."] | None,
    protected: int,
) -> Bool[Array, "..."]:
    """Mask of the positions that a query sees; `reach` and `newest` broadcast against
    `position`."""
    seen = position >= 0  # -1: the slot is empty
    if newest is None:
        return seen
    seen &= position <= newest  # positions of tokens to come are written beforehand
    if reach is None:
        return seen
    return seen & ((position < protected) | (position > newest - reach))


def kernel_operands(
    query: Query, slots: HeadSlots, kernel: str, *, groups: bool = False
) -> tuple[Query, HeadSlots]:
    """Both as a Pallas kernel takes them: only the arrays that it reads, and single numbers as
    arrays of one. groups: whether the kernel serves heads that share keys and values.

    Raises:
      NotImplementedError: heads share keys and values, which this kernel does not serve.
    """
    group = slots.group_size(query.q)
    serves = f"{kernel} serves one query per head of keys and values, not groups of {group}"
    require(group == 1 or groups, serves)
    sums, weight = slots.mass is not None, None
    if sums:
        weight = jnp.asarray(query.mass_weight, jnp.float32)
    probe = query.probe and replace(query.probe, wanted=None)  # a kernel chooses by it beforehand
    query = Query(query.q, query.newest, query.first_bias, weight, query.protected, probe)
    # a subclass may have more arrays, which would become operands of the kernel
    arrays = slots.pool, slots.position, slots.scale, slots.mass, slots.reach, slots.used
    arrays = *arrays, slots.scores if probe else None
    # jax rebuilds both classes without checking annotations: scalars are [1] from here on
    given = query, HeadSlots(*arrays)
    return jax.tree.map(lambda a: a if jnp.ndim(a) else jnp.reshape(a, 1), given)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuerySum:
    """A running sum of queries: total * (keep > 0) + weight * query, in float32.

    keep, weight: single numbers.
    """

    total: Float[Array, "R C"]
    keep: Float[Array, ""]
    weight: Float[Array, ""]
