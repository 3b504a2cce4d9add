"""Moves of slots: signature, documentation and dispatch.

After a stage of a model that draws token by token, what is kept of its buffer, the last slots of
every head, goes into slots that others have left.
"""

from jaxtyping import Array, Float, Int, Num

from pallas_kernels import implementations

MODULES = implementations.modules_of(__package__, "tpu")


def move(
    pool: Num[Array, "R N C KV"],
    slot: Int[Array, "R N P"],
    *,
    pool_scale: Float[Array, "R 2 N C"] | None = None,
    implementation: str | None = None,
) -> tuple[Num[Array, "R N C KV"], Float[Array, "R 2 N C"] | None]:
    """Copy the last P slots of every head into the slots given, bit by bit.

    The pool is updated in place when its buffer is not needed any more (donated, or carried by a
    scan).

    Args:
      pool: keys and values, whatever they are, NaN included.
      slot: int32, where the P slots go, all at the same time: at least 0, and no number twice in a
        head. What is given C or more goes nowhere. Slots that nothing goes to stay as they are, the
        last ones too.
      pool_scale: of an int8 pool, which moves along.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform. On
        GPUs the reference is all there is; their names run it.

    Returns:
      The pool and its scales, or None.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    return implementations.run(implementation, MODULES, "move", pool, slot, pool_scale)
