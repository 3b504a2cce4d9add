"""Rows that take turns, where all of them together would take too much memory."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jaxtyping import Array

Results = TypeVar("Results")  # a tree of arrays with a leading axis of rows


def in_turns(
    function: Callable[..., Results], operands: Sequence[Array], place: Results, at_once: int
) -> Results:
    """`function(*operands)` of `at_once` rows at a time; the last turn may have fewer.

    Results take the place of `place`, arrays of their shapes and types, which should be computed
    from the operands. `lax.map` would begin with an empty result, which depends on nothing: XLA's
    GPU compiler makes those of all layers in one kernel, ahead of the first of them.
    """

    def replaced(i, out, number=at_once):
        some = (jax.lax.dynamic_slice_in_dim(a, i, number) for a in operands)
        return jax.tree.map(
            lambda new, a: jax.lax.dynamic_update_slice_in_dim(a, new.astype(a.dtype), i, 0),
            function(*some),
            out,
        )

    rows = len(operands[0])
    whole, rest = divmod(rows, at_once)
    out = jax.lax.fori_loop(0, whole, lambda i, out: replaced(i * at_once, out), place)
    return replaced(rows - rest, out, rest) if rest else out
