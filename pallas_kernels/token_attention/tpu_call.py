"""What the TPU kernels of token attention are given, and what they give back.

All are pytrees, so a kernel gets the same trees of references, and what nobody asks for is None in
both. Operands are told apart by the names of their fields.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.token_attention.operands import HeadSlots, NewToken, Query

Tree = TypeVar("Tree")


class Prefetched(NamedTuple):
    """int32 [1] each, known before a grid step begins, so that they can choose what it fetches.

    slot: of the token to store. used: slots in use (`HeadSlots.used`). wanted: whether the scores
    of a probe are, 0 or 1.
    """

    slot: Array | None = None
    used: Array | None = None
    wanted: Array | None = None


class Operands(NamedTuple):
    """Operands in memory. token: key and value of the token to store, without its slot."""

    query: Query
    slots: HeadSlots
    token: NewToken | None


class Results(NamedTuple):
    """out: [R, M, H]. mass: new sums. pool: the tile of slots with the token. scores: a probe's."""

    out: Array
    mass: Array | None = None
    pool: Array | None = None
    scores: Array | None = None


def shapes(results: Results) -> Results:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), results)


def specs(arrays: Tree, spec: Callable[[str, Array], pl.BlockSpec]) -> Tree:
    """`spec` of the name and the array of every field."""
    # None has no leaf, so specs are missing where arrays are
    return jax.tree_util.tree_map_with_path(lambda path, array: spec(path[-1].name, array), arrays)


def aliases(numbers: Prefetched, given: Operands, results: Results) -> dict[int, int]:
    """Sums, the pool and scores are changed in place: what is not written keeps what it holds."""
    operands, found = _names((numbers, given)), _names(results)
    return {operands.index(n): found.index(n) for n in ("mass", "pool", "scores") if n in found}


def _names(tree) -> list[str]:
    """Names of the fields, in the order in which Pallas counts operands and results."""
    return [path[-1].name for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
