"""Token attention: signature, documentation and dispatch.

The op serves one layer of one drawn token: every row has one query per head, which sees the slots
of its head that hold something. The token's own key and value lie in a slot already, or are put
there first. All heads of a layer have equally many slots, so a layer's pool is one array and needs
no table; which slots are visible is in the positions of what they hold.
"""

from jaxtyping import Array, Float, Int, Num

from pallas_kernels import implementations
from pallas_kernels.token_attention.sight import Sight

MODULES = implementations.modules_of(__package__, "mosaic", "tpu")
# `mosaic` runs where it is named: no chip has confirmed it yet
AUTOMATIC = {name: module for name, module in MODULES.items() if name != "mosaic"}
SCORES = implementations.modules_of(__package__, "tpu", tpu="tpu_scores")


def attend(
    q: Float[Array, "R N H"],
    pool: Num[Array, "R N C KV"],
    position: Int[Array, "#R #N C"],
    *,
    newest: Int[Array, ""] | None = None,
    reach: Int[Array, "R N"] | None = None,
    used: Int[Array, ""] | None = None,
    protected: int = 0,
    first_bias: Float[Array, " R"] | None = None,
    pool_scale: Float[Array, "R 2 N C"] | None = None,
    mass: Float[Array, "R N C"] | None = None,
    mass_weight: Float[Array, ""] | float = 1.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "R N H"], Float[Array, "R N C"] | None]:
    """Attention of one query per row and head over its visible slots.

    Traffic: a kernel reads the pool once; H is 64, 100 or 128, C up to some thousand (usually 50 to
    600), R 2 to 256. Positions take 4 bytes per slot, masses 8 (read and written).

    Args:
      q: finished queries (rotated, with the attention scale).
      pool: K in the first half of the last axis, V in the second (KV = 2 H).
      position: of the token in every slot, -1: empty. Empty slots may hold anything, NaN included.
        Every row has at least one visible slot in each head.
      newest: the largest position that is seen, the query's own; None: all. So the positions of
        tokens to come may be written beforehand.
      reach: how many positions up to `newest` a head sees, at least 1; None: all. It comes with
        `newest`. protected: static, positions below it are seen whatever `reach` says.
      used: slots from this number on are empty in every row and head, at least 1; None: all may
        hold something. A kernel may leave the others unread. On CPUs there is then no gradient in
        reverse, since a loop is as long as `used` says.
      first_bias: float32, added to the score of slot 0.
      pool_scale: for an int8 pool, what keys of its slots are multiplied by, then values.
      mass: float32 sums of attention weights per slot. Given, it is returned with this query's
        weights times `mass_weight` added.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform,
        on GPUs the reference. There is no kernel of `triton`: its name runs the reference.

    Returns:
      The output in the type of `q` (softmax statistics are float32), and the new `mass` or None.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    sight = _sight(newest, reach, used, protected)
    arguments = (q, pool, position, sight, first_bias, pool_scale, mass, mass_weight)
    modules = AUTOMATIC if implementation is None else MODULES
    return implementations.run(implementation, modules, "attend", *arguments)


def store_and_attend(
    q: Float[Array, "R N H"],
    k: Float[Array, "R N H"],
    v: Float[Array, "R N H"],
    slot: Int[Array, ""],
    pool: Num[Array, "R N C KV"],
    position: Int[Array, "#R #N C"],
    *,
    newest: Int[Array, ""] | None = None,
    reach: Int[Array, "R N"] | None = None,
    used: Int[Array, ""] | None = None,
    protected: int = 0,
    first_bias: Float[Array, " R"] | None = None,
    pool_scale: Float[Array, "R 2 N C"] | None = None,
    mass: Float[Array, "R N C"] | None = None,
    mass_weight: Float[Array, ""] | float = 1.0,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "R N H"],
    Float[Array, "R N C"] | None,
    Num[Array, "R N C KV"],
    Float[Array, "R 2 N C"] | None,
]:
    """Store the token's key and value, then `attend`, of which all that is not told here is meant.

    The pool is updated in place when its buffer is not needed any more (donated, or carried by a
    scan): a kernel aliases it, and writes a tile of slots of every head.

    Args:
      k, v: finished, as the pool holds them (an int8 pool: as `cache_write.write` stores them).
      slot: where they go in all rows and heads, smaller than C and `used`. What lies there before
        may be anything, NaN included.
      position: with the token's own already in that slot.

    Returns:
      What `attend` returns, the pool and its scales (None unless int8).

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    sight = _sight(newest, reach, used, protected)
    arguments = (q, k, v, slot, pool, position, sight, first_bias, pool_scale, mass, mass_weight)
    modules = AUTOMATIC if implementation is None else MODULES
    return implementations.run(implementation, modules, "store_and_attend", *arguments)


def _sight(newest, reach, used, protected: int) -> Sight:
    if reach is not None and newest is None:
        raise ValueError("reach is counted from newest, which is not given")
    return Sight(newest, reach, used, protected)


def scores(
    q: Float[Array, "R N Q H"],
    pool: Num[Array, "R N C KV"],
    *,
    pool_scale: Float[Array, "R 2 N C"] | None = None,
    first: int = 0,
    implementation: str | None = None,
) -> Float[Array, "R N Q S"]:
    """Scores of a few queries before the softmax, float32, of all S = C - `first` slots from number
    `first` on: what empty ones hold included.

    Products with float32 queries are exact to float32 in a TPU's kernel. In the reference they have
    the precision of the platform, which on a TPU rounds both factors of several queries.

    Args:
      q: finite; of others a kernel gives NaN for infinite scores.
      first: static. A kernel takes the pool as a whole: a part of it would be copied before.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform, on
        GPUs the reference, which all names of GPU kernels run.
      Others as in `attend`.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    arguments = (q, pool, pool_scale, first)
    return implementations.run(implementation, SCORES, "scores", *arguments)
