"""Ranks of a head's tokens: signature, documentation and dispatch.

Policies that decide after every stage of tokens evict those of lowest rank, of a few hundred slots
per head and of many heads at once. Everything is compared with everything: a sort takes seconds to
compile per shape on TPUs, and heads have few slots.
"""

from jaxtyping import Array, Bool, Int, Num

from pallas_kernels import implementations

MODULES = implementations.modules_of(__package__, "tpu")


def rank(
    score: Num[Array, "R N K"] | None,
    tie: Int[Array, "R N K"],
    among: Bool[Array, "R N K"],
    part: Bool[Array, "R N K"] | None = None,
    *,
    implementation: str | None = None,
) -> Int[Array, "R N K"]:
    """How many of `among` have a lower score, or of equals a lower `tie`; for tokens outside as if
    they were in it. Every implementation computes the same numbers: they are counts.

    Traffic: 16 bytes per slot and what `score` takes; K is some hundred. K^2 comparisons per head.

    Args:
      score: numbers of at most 32 bits, unsigned ones of at most 16; NaN is neither lower than
        anything nor equal to it. None: of all the same, so `tie` decides.
      tie: int32, below its largest value.
      part: true in one of two parts, of which only the token's own counts.
      implementation: one of `implementations.NAMES`; None takes that of `implementations.naming` or
        the best one for this platform, on GPUs the reference. There are no kernels for GPUs: their
        names run the reference.
    """
    return implementations.run(implementation, MODULES, "rank", score, tie, among, part)
