"""Operands of the Pallas-Triton kernels, and the limits of what these take.

A reference on a GPU is a pointer. A BlockSpec moves it to the program's head, row or part of an
array and copies nothing, so it may span all tokens of a head, however far apart they lie. The
dataclasses here are operands: outside a kernel their fields hold arrays, inside it references to
the program's share.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.implementations import check_attention
from pallas_kernels.projection import K, Projection, Q, V
from pallas_kernels.refs import Operand, one_number

# Triton's arrays have powers of two for sizes; a tensor core multiplies at least 16 elements.
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = tuple(2**i for i in range(9))
POOL_DTYPES = ("bfloat16", "float16", "float32", "int8")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """Queries, keys or values of a scale, with what has still to be done to them.

    rows: outside a kernel the projection [R, T, 3, N, H], from which `part` is read, or finished
      tokens [R, T, N, H]; inside [T, H].
    bias: [N, H]; inside [H].
    rotation: cosines and sines, [T, H] each.
    multiplier: [N]; inside [1].
    unit: whether rows are scaled to unit length.
    scale: the factor of rows that are not.
    """

    rows: Operand
    bias: Operand = None
    rotation: tuple[Operand, Operand] | None = None
    multiplier: Operand = None
    part: int = field(default=0, metadata=dict(static=True))
    unit: bool = field(default=False, metadata=dict(static=True))
    scale: float = field(default=1.0, metadata=dict(static=True))

    @classmethod
    def queries(cls, given: Projection) -> "Tokens":
        given = given.sliced().multiplied()
        return cls(
            rows=given.qkv,
            bias=given.q_bias,
            rotation=given.rotation,
            multiplier=given.multiplier,
            part=Q,
            unit=given.multiplier is not None,
            scale=given.scale,
        )

    @classmethod
    def keys(cls, given: Projection) -> "Tokens":
        unit = given.multiplier is not None
        return cls(given.multiplied().qkv, rotation=given.rotation, part=K, unit=unit)

    @classmethod
    def values(cls, given: Projection) -> "Tokens":
        return cls(given.multiplied().qkv, given.sliced().v_bias, part=V)

    def with_rows(self, finished: Float[Array, "R N T H"]) -> "Tokens":
        """The same tokens, finished by XLA; unchanged where nothing was left to do."""
        # Compilers cancel this transpose against the one in `Projection`.
        return self if self.done else Tokens(finished.transpose(0, 2, 1, 3))

    @property
    def done(self) -> bool:
        """Whether rows are finished."""
        return self.bias is None and self.rotation is None and not self.unit and self.scale == 1

    @property
    def specs(self) -> "Tokens":
        """The share of a program, for a grid (tiles, heads, rows)."""
        tokens, size, part = self.rows.shape[1], self.rows.shape[-1], self.part
        of_token = pl.BlockSpec((None, tokens, None, size), lambda i, n, r: (r, 0, n, 0))
        if self.rows.ndim == 5:
            block = (None, tokens, None, None, size)
            of_token = pl.BlockSpec(block, lambda i, n, r: (r, 0, part, n, 0))
        bias = pl.BlockSpec((None, size), lambda i, n, r: (n, 0))
        multiplier = pl.BlockSpec((1,), lambda i, n, r: (n,))
        angles = pl.BlockSpec((tokens, size), lambda i, n, r: (0, 0))
        return replace(
            self,
            rows=of_token,
            bias=None if self.bias is None else bias,
            rotation=None if self.rotation is None else (angles, angles),
            multiplier=None if self.multiplier is None else multiplier,
        )

    # --- inside a kernel ---

    @property
    def dtype(self):
        return self.rows.dtype

    @property
    def head_dim(self) -> int:
        return self.rows.shape[-1]

    def raw(self, index: Int[Array, " K"], mask) -> Array:
        """Tokens `index` as they lie in memory, [K, H]; zero where `mask` [K] is false."""
        return rows_at(self.rows, index, mask, self.head_dim)

    def finished(self, index: Int[Array, " K"], mask) -> Float[Array, "K H"]:
        """Finished tokens `index`, float32. Where `mask` [K] is false nothing is read, and the
        result is finite."""
        found = self.raw(index, mask).astype(jnp.float32)
        if self.bias is not None:
            found += self.bias_row()[None]
        factor = self.scale
        if self.unit:
            # as in `projection.length`; masked rows are zeros, which this keeps finite
            length = jnp.maximum(jnp.sqrt(jnp.sum(found * found, axis=1)), 1e-12)
            factor = ((1 if self.multiplier is None else self.multiplier[0]) / length)[:, None]
        if self.rotation is not None:
            # sines first, then cosines: both at once would take too many registers
            cos, sin = self.rotation
            turned = quarter_turn(found) * rows_at(sin, index, mask, self.head_dim)
            found = found * rows_at(cos, index, mask, self.head_dim) + turned
        return found * factor

    def bias_row(self) -> Float[Array, " H"]:
        """The head's bias, float32."""
        column = jnp.arange(self.head_dim, dtype=jnp.int32)
        return plgpu.load(self.bias.at[column]).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadTables:
    """Tables of numbers per head.

    arrays: all layers [L, N, M] where `layer` is given, else per row [R, N, M] or for all rows [1,
      N, M]. Inside a kernel [L or 1, M].
    layer: [1], the layer that is read.
    """

    arrays: tuple[Operand, ...]
    layer: Operand = None

    @classmethod
    def of(cls, layer: Int[Array, ""] | None, *arrays) -> "HeadTables":
        """The operands for tables [N, M], [R, N, M] or, with `layer`, [L, N, M]."""
        arrays = tuple(a if a.ndim == 3 else a[None] for a in map(jnp.asarray, arrays))
        return cls(arrays, None if layer is None else one_number(layer))

    @property
    def specs(self) -> "HeadTables":
        def spec(array) -> pl.BlockSpec:
            first, _, length = array.shape
            # a program sees all layers, because a BlockSpec cannot depend on a traced number
            if self.layer is not None:
                return pl.BlockSpec((first, None, length), lambda i, n, r: (0, n, 0))
            return pl.BlockSpec((1, None, length), lambda i, n, r: (r if first > 1 else 0, n, 0))

        layer = None if self.layer is None else line_spec(1)
        return HeadTables(tuple(map(spec, self.arrays)), layer)

    # --- inside a kernel ---

    def load(self, which: int, index: Int[Array, " K"], mask, other: int = 0) -> Int[Array, " K"]:
        """Numbers of table `which` for the program's layer, head and row; `other` where `mask` is
        false."""
        # without a layer the spec has chosen the row, and one line is left
        layer = jnp.int32(0) if self.layer is None else self.layer[0]
        view = self.arrays[which].at[jnp.broadcast_to(layer, index.shape), index]
        return plgpu.load(view, mask=mask, other=other)


def quarter_turn(x: Float[Array, "K H"]) -> Float[Array, "K H"]:
    """`projection.quarter_turn` in operations that Triton has. Both numbers of a pair belong to one
    thread, so nothing passes between threads."""
    pairs = x.reshape(x.shape[0], -1, 2)
    first, second = (a[..., 0] for a in jnp.split(pairs, 2, axis=-1))
    return jnp.stack([-second, first], axis=-1).reshape(x.shape)


def load(ref, index: Int[Array, " K"], mask) -> Array:
    """ref[index]; zero where `mask` [K] is false."""
    return plgpu.load(ref.at[index], mask=mask, other=0)


def rows_at(ref, index: Int[Array, " K"], mask, head_dim: int, half: int = 0) -> Array:
    """Rows [K, H] of ref[:, half * H :]; zero where `mask` [K] is false."""
    column = half * head_dim + jnp.arange(head_dim, dtype=jnp.int32)
    shape = (*index.shape, head_dim)  # arrays, no slices: interpreted masks cannot mix with them
    view = ref.at[jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(column, shape)]
    return plgpu.load(view, mask=mask[:, None], other=0)


# --- what a program of a grid (tiles, heads, rows) sees ---


def head_spec(*shape: int) -> pl.BlockSpec:
    """One head of an array [R, N, *shape]."""
    return pl.BlockSpec((None, None, *shape), lambda i, n, r: (r, n, *(0,) * len(shape)))


def row_spec(array: Array) -> pl.BlockSpec:
    """One row of an array, in which loads and stores name the slots."""
    return pl.BlockSpec((None, *array.shape[1:]), lambda i, n, r: (r, *(0,) * (array.ndim - 1)))


def line_spec(size: int) -> pl.BlockSpec:
    """An array [size] that all programs share."""
    return pl.BlockSpec((size,), lambda i, n, r: (0,))


def check(projection: Projection, kv_pool: Array, kv_scale: Array | None, interpret: bool) -> None:
    """Raise `NotImplementedError` with the reason where the kernels cannot run. Interpreted kernels
    take every size."""
    takes = HEAD_DIMS, BLOCK_SIZES
    if interpret:
        takes = projection.shape[-1:], kv_pool.shape[2:3]
    check_attention("triton", projection, kv_pool, kv_scale, *takes, POOL_DTYPES)
    if not interpret and kv_pool.dtype == jnp.int8 and 2**31 < kv_pool.size <= 2**32:
        # Pallas-Triton takes 32-bit offsets, which are signed, up to 2**32 bytes and 64-bit ones
        # beyond. Only in arrays of one byte per element does that allow more than 2**31 elements.
        raise NotImplementedError(
            f"triton attention cannot address an int8 pool of {kv_pool.size / 2**30:.2f} GiB "
            "(between 2 and 4 GiB): choose another batch size, or a bfloat16 pool"
        )
