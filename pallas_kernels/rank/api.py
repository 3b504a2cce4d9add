"""Ranks of a head's tokens: signature, documentation and dispatch.

Policies that decide after every stage of tokens evict the tokens of lowest rank, in many heads at
once, of a few hundred slots each. Every slot is compared with every other: a sort takes seconds to
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
    """Count for every token the tokens of `among` that have a lower score, or the same score and a
    lower `tie`. Tokens outside of `among` are compared with it as well.

    Every implementation computes the same numbers, because they are counts.

    Traffic: 16 bytes per slot and what `score` takes; K is some hundred. K^2 comparisons per head.

    Args:
      score: numbers of at most 32 bits, unsigned ones of at most 16; NaN is neither lower than
        anything nor equal to it. None: all scores are the same, so `tie` decides.
      tie: int32, below the largest int32.
      among: tokens that count.
      part: divides the tokens in two; a token is compared with those of its own part. None: with
        all.
      implementation: one of `implementations.NAMES`; None takes the best one for this
        platform. There are no kernels for GPUs: their names run the reference.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    return implementations.run(implementation, MODULES, "rank", score, tie, among, part)
