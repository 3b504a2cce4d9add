"""Operands between two matrix products: the sums of the first with the steps that are still to be
done, vectors of modulated norms, and rows in 8 bits for the second.

Kernels read all of it where it lies. The methods here define what is correct.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

Activation = Callable[[Array], Array]  # a function of every number
TILE = 128  # tokens to whose multiples kernels write scales: others read them by whole tiles
TINY = 1e-30  # the least magnitude of a row: one of zeros has a scale, too


class Bits8(Protocol):
    """Quantisation of rows to 8 bits. dtype: of the numbers. largest: the magnitude that the
    largest of a row is scaled to."""

    dtype: np.dtype
    largest: float

    def rounded(self, x: Array) -> Array:
        """Numbers in the range of the scheme, in its type."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows8:
    """Rows in 8 bits: `numbers * scale` is what they stand for. dtype: static, of the rows that
    they were. From a kernel, scales go on behind the last token, up to a multiple of `TILE`, and
    may be anything there."""

    numbers: Num[Array, "*rows T D"]
    scale: Float[Array, "*rows _ 1"]
    dtype: np.dtype = field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Result of a matrix product, with the steps that are still to be done.

    array: the product, finished where nothing else is given.
    row_scale, channel_scale: float32, of a product in 8 bits; given together. The first is the
      scale of `Rows8`, which may go on behind the last token.
    bias: added after the scales.
    dtype: static, of the finished product; None: that of `array`.
    """

    array: Num[Array, "*rows D"]
    row_scale: Float[Array, "*rows_with_more 1"] | None = None
    channel_scale: Float[Array, " D"] | None = None
    bias: Float[Array, " D"] | None = None
    dtype: np.dtype | None = field(default=None, metadata=dict(static=True))

    @property
    def kind(self) -> np.dtype:
        """The type of the finished product."""
        return jnp.dtype(self.dtype or self.array.dtype)

    def finished(self) -> Float[Array, "*rows D"]:
        """With scales and bias."""
        found = self.array
        if self.row_scale is not None:
            rows = self.row_scale[..., : found.shape[-2], :]
            found = (found.astype(jnp.float32) * rows * self.channel_scale).astype(self.kind)
        return found if self.bias is None else found + self.bias


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Vectors:
    """Vectors that the condition of each row gives to a layer: gates, scales, shifts.

    array: of one layer, or of all. R: 1, if all rows share them.
    layer: if given, the one that counts. Kernels read it where it lies.
    """

    array: Float[Array, "*layers R places D"]
    layer: Int[Array, ""] | int | None = None

    def at(self, place: int) -> Float[Array, "R D"]:
        """The vector in this place, of every row."""
        here = self.array if self.layer is None else self.array[self.layer]
        return here[:, place]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Branch:
    """Addend of a residual stream: a product, multiplied by the vector in `place` (static) of
    `gates`."""

    sums: Sums
    gates: Vectors
    place: int = field(metadata=dict(static=True))

    def added_to(self, stream: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        return stream + self.sums.finished() * self.gates.at(self.place)[:, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """Layer normalisation, then `x * (1 + scale) + shift` with the vectors in these places.

    eps, dtype: of the norm, and of its result. bits: if given, the result is `Rows8`. All but the
    vectors are static.
    """

    vectors: Vectors
    scale: int = field(metadata=dict(static=True))
    shift: int = field(metadata=dict(static=True))
    eps: float = field(metadata=dict(static=True))
    dtype: np.dtype = field(metadata=dict(static=True))
    bits: Bits8 | None = field(default=None, metadata=dict(static=True))
