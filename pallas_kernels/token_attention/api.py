"""Token attention: signature, documentation and dispatch.

The operation serves one layer and one drawn token: every row has one query per query head, which
sees the slots of its head that hold something. The token's own key and value lie in a slot already,
or are stored first. See `operands` for what all functions here take.
"""

from typing import TypeVar

from jaxtyping import Array, Float

from pallas_kernels import implementations
from pallas_kernels.token_attention.operands import HeadSlots, NewToken, Query

MODULES = implementations.modules_of(__package__, "mosaic", "tpu")
# `mosaic` serves no groups of query heads: nobody is warned that the reference does
OF_GROUPS = {name: module for name, module in MODULES.items() if name != "mosaic"}
SCORES = implementations.modules_of(__package__, "tpu", tpu="tpu_scores")
Slots = TypeVar("Slots", bound=HeadSlots)  # the caller's class comes back


def attend(
    query: Query, slots: HeadSlots, *, implementation: str | None = None
) -> tuple[Float[Array, "R GM H"], Float[Array, "R M C"] | None]:
    """Attention of one query per row and query head over its visible slots.

    Traffic: a kernel reads the pool once. H is 64, 100 or 128, C up to some thousand (usually 50 to
    600), R 2 to 256. Positions take 4 bytes per slot, masses 8 (read and written).

    Args:
      query: see `Query`. G query heads may share a head of keys and values; the kernels serve G = 1
        only.
      slots: see `HeadSlots`. Every row has at least one visible slot in each head. With `used`
        there is no gradient in reverse on CPUs, where the length of a loop is `used`.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform.
        There is no kernel `triton`: this name runs the reference.

    Returns:
      The output in the type of `query.q` (softmax statistics are float32), and the new masses or
      None. A slot's mass grows by the query's attention weight times `query.mass_weight`; with
      groups by the sum of the weights of all G query heads that read it.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
      ValueError: `slots.reach` without `query.newest`, or query heads that are no multiple of M.
    """
    modules = _checked(query, slots, implementation)
    return implementations.run(implementation, modules, "attend", query, slots)


def store_and_attend(
    query: Query, slots: Slots, token: NewToken, *, implementation: str | None = None
) -> tuple[Float[Array, "R GM H"], Slots]:
    """Store the token's key and value, then `attend`.

    The pool is updated in place when its buffer is not needed any more (donated, or carried by a
    scan): a kernel aliases it, and writes a tile of slots of every head.

    Args:
      query, implementation: as in `attend`.
      slots: as in `attend`. The position of the token lies in its slot already.
      token: its slot is smaller than C and than `slots.used`. The slot may hold anything before,
        NaN included.

    Returns:
      The output as in `attend`, and the slots with the token, the new masses and, where
      `query.probe` asks, its `scores`: those that `scores` gives after the token is stored.

    Raises:
      NotImplementedError, ValueError: as in `attend`.
    """
    modules = _checked(query, slots, implementation)
    return implementations.run(implementation, modules, "store_and_attend", query, slots, token)


def scores_on_the_way(slots: HeadSlots, implementation: str | None = None) -> bool:
    """Whether `store_and_attend` scores a `Probe` without reading the slots once more. Other
    implementations score it all the same, in a pass of its own."""
    name = implementations.first_choice(implementation, MODULES)
    return MODULES[name.removesuffix(implementations.SUFFIX)]().scores_on_the_way(slots)


def _checked(query: Query, slots: HeadSlots, implementation: str | None):
    """Return the implementations to choose from."""
    group = slots.group_size(query.q)
    # checked here for all implementations, which would see every slot
    if slots.reach is not None and query.newest is None:
        raise ValueError("reach is counted from newest, which is not given")
    return OF_GROUPS if group > 1 and implementation is None else MODULES


def scores(
    q: Float[Array, "R GM Q H"],
    slots: HeadSlots,
    *,
    first: int = 0,
    implementation: str | None = None,
) -> Float[Array, "R GM Q S"]:
    """Scores of a few queries per head before the softmax, float32.

    There are scores for all S = C - `first` slots from number `first` on, whatever empty slots
    hold. Products with float32 queries are exact to float32 in the TPU kernel. The reference
    multiplies with the precision of the platform, which on a TPU rounds both factors if there are
    several queries.

    Args:
      q: finite numbers; for infinite ones a kernel gives NaN. Query head i reads the keys of head
        i // G, where G query heads share one.
      slots: only pool and scale are read.
      first: static. A kernel takes the whole pool, because a part of it would be copied before.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform, on
        GPUs the reference. The names of GPU kernels run the reference.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
      ValueError: query heads that are no multiple of M.
    """
    rows, _, count, size = q.shape
    group = slots.group_size(q)
    # the queries of a group are queries of the same keys: together they are one head's
    together = q.reshape(rows, -1, group * count, size)  # as it is where G = 1
    found = implementations.run(implementation, SCORES, "scores", together, slots, first)
    return found.reshape(*q.shape[:3], -1)
