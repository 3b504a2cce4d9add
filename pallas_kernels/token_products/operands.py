"""Operands of the products of one token: the residual stream with its next norm, and the finish of
queries and keys.

Letters: R rows, D width of the stream, C columns of a product, A columns that angles repeat after.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.projection import quarter_turn_matrix

PIECE = 64  # columns that are finished at once, and that one sum of squares is over


class RMSNorm(NamedTuple):
    """Weights of an RMS norm among those of all norms. Cut out, they would take a kernel each."""

    weights: Float[Array, "norms D"]
    number: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenStream:
    """The residual stream between two products, and what the next one reads of it.

    The norm is one number per row, so it commutes with the product: `scaled` is the stream times
    the norm's weights alone, and what the product gives is multiplied by the number.

    x: the stream, float32. A kernel has whole tiles of rows; those that nobody asked for may hold
      anything.
    norm: the RMS norm that comes next.
    scaled: `x` times the norm's weights, in the type of the products; None where a product
      normalises `x` itself.
    squares: float32, sums of squares of `PIECE` columns of `x`; None as above.
    eps: of the norm.
    """

    x: Float[Array, "R D"]
    norm: RMSNorm
    scaled: Float[Array, "R D"] | None = None
    squares: Float[Array, "pieces R"] | None = None
    eps: float = field(default=1e-5, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Angles:
    """Rotation of the queries and keys of a token, and the factor of queries.

    cos, sin: float32, of a head; an axis of 1: of all rows. Every number x_i becomes x_i cos_i +
      t_i sin_i.
    halves: whether t_i is the number half a head further (the sign is in `sin`), as models of the
      Llama family turn; else t is (-b, a) for every pair (a, b) of neighbours.
    queries, keys: static, columns of the product that are queries, then keys, then as many values.
    scale: static, the factor of queries.
    """

    cos: Float[Array, "#R H"]
    sin: Float[Array, "#R H"]
    queries: int = field(metadata=dict(static=True))
    keys: int = field(metadata=dict(static=True))
    scale: float = field(default=1.0, metadata=dict(static=True))
    halves: bool = field(default=False, metadata=dict(static=True))

    @property
    def head_dim(self) -> int:
        return self.cos.shape[-1]

    def turn(self, size: int) -> np.ndarray:
        """float32 [size, size]: x @ matrix is t, for as many numbers of whole pairs or heads."""
        if not self.halves:
            return quarter_turn_matrix(size)
        number, half = np.arange(size), self.head_dim // 2
        within = number % self.head_dim
        other = number - within + (within + half) % self.head_dim
        matrix = np.zeros((size, size), np.float32)
        matrix[other, number] = 1
        return matrix
