"""Matrices of linear layers in 8 bits, and products with them.

A matrix has a float32 scale for every output channel:

    matrix[i, o] = scale[o] * array[i, o],  scale[o] = max over i of |matrix[i, o]| / largest

Where only weights are in 8 bits, a product converts them to the type of its input on the way and
runs in that type; its result is multiplied by the scales. A device therefore never holds a matrix
in a floating type: TPU and Triton products convert as they read (docs/lab/precision.md), and
on a CPU a product takes some rows of the matrix at a time. Where activations are in 8 bits, too,
each of their rows gets a scale as well, and both scales multiply the sums (`schemes.Scheme`).
`sums` takes rows that a kernel has brought into 8 bits, and leaves both scales to the next one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from pallas_kernels import target
from pallas_kernels.residual.operands import Rows8, Sums
from pallas_kernels.residual.reference import rows_8
from varjax.core.layers import Activation, Matrix
from varjax.fast import arrange, schemes
from varjax.fast.schemes import INT8, SCHEMES, Scheme, check_widths, why_not_here
from varjax.fast.stored import Leaf, Stored

# Bytes of the rows that a CPU converts at a time: few enough to stay in its caches. Its compiler
# would convert all matrices before the first token, and keep them.
CPU_BYTES = 2**20
# Rows that the matrices of all layers multiply at once: the result of more is large, and is turned.
ROWS_AT_ONCE = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized(Matrix):
    """A matrix [D_in, D_out] in 8 bits, or the matrices of all layers. It may be abstract.

    array: its numbers; turned, [D_out, D_in], where activations are in 8 bits, too.
    dtype: the type of the matrix that it stands for.
    """

    array: Leaf
    scale: Leaf
    dtype: np.dtype = field(metadata=dict(static=True))
    scheme: Scheme = field(default=SCHEMES[INT8], metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        *layers, first, second = self.array.shape
        turned = self.scheme.activations
        return (*layers, second, first) if turned else (*layers, first, second)

    def by_axis(
        self, function: Callable[[Leaf, int | None], object], axis: int | None
    ) -> "Quantized":
        if axis is None:
            return jax.tree.map(lambda array: function(array, None), self)
        last = len(self.shape) - 1  # outputs
        other = {last: last - 1, last - 1: last}.get(axis, axis)
        return replace(
            self,
            array=function(self.array, other if self.scheme.activations else axis),
            scale=function(self.scale, None if axis == last - 1 else min(axis, last - 1)),
        )

    # --- products ---------------------------------------------------------------------------------

    def product(
        self,
        x: Float[Array, "... D_in"] | Rows8,
        dtype=None,
        axis: str | None = None,
        activation: Activation | None = None,
    ) -> Float[Array, "... D_out"]:
        """`x @ matrix`, summed up in float32; of rows in 8 bits `sums`, finished.
        `NotImplementedError`: the device that is traced for does not multiply in this scheme.

        dtype: of the result; None: of `x`.
        axis: of the mesh, over whose devices `D_in` is divided: they scale a row alike.
        activation: applied to `x` first.
        """
        if isinstance(x, Rows8):
            return self.sums(x).finished()
        rows, kind = x.reshape(-1, x.shape[-1]), dtype or x.dtype
        if self.scheme.activations:
            in_8_bits = rows_8(rows, self.scheme, activation, axis)
            sums = self._multiply(in_8_bits.numbers, kind).astype(jnp.float32) * in_8_bits.scale
        else:
            rows = activation(rows) if activation else rows
            if target.platform() == "cpu":
                sums = self._by_parts(rows)
            else:
                matrix = self.array.astype(rows.dtype)
                sums = jnp.dot(rows, matrix, preferred_element_type=jnp.float32)
        return (sums * self.scale).astype(kind).reshape(*x.shape[:-1], -1)

    def of_all_layers(self, x: Float[Array, "... D_in"]) -> Float[Array, "L ... D_out"]:
        """`product` of the same rows with the matrices of all layers.

        Matrices that lie turned are one matrix: a loop would copy each for the library, and bring
        the rows into 8 bits for each.
        """
        layers, d_in, d_out = self.shape
        if not self.scheme.activations or x.size > ROWS_AT_ONCE * d_in:
            return jax.lax.map(lambda matrix: matrix.product(x), self)
        joined = replace(self, array=self.array.reshape(-1, d_in), scale=self.scale.reshape(-1))
        found = joined.product(x).reshape(*x.shape[:-1], layers, d_out)
        return jnp.moveaxis(found, -2, 0)

    def sums(self, x: Rows8) -> Sums:
        """The product of rows that are in 8 bits already, with its scales still to come. Sums have
        the type of the rows; those of int8 are int32. `NotImplementedError`: as in `product`."""
        found = self._multiply(x.numbers.reshape(-1, x.shape[-1]), x.dtype)
        if found.dtype != jnp.int32:
            found = found.astype(x.dtype)
        shape = (*x.shape[:-1], self.shape[-1])
        return Sums(found.reshape(shape), x.scale, self.scale, dtype=x.dtype)

    def _multiply(self, numbers: Num[Array, "R D_in"], kind) -> Num[Array, "R D_out"]:
        """Sums of products of numbers in 8 bits. kind: what the library of a GPU rounds to."""
        if why := why_not_here(self.scheme):
            raise NotImplementedError(why)
        if self.scheme.emulated:
            return self._by_parts(numbers.astype(jnp.float32))
        if self.scheme.dtype == np.int8:
            kind = jnp.int32
        elif target.platform() != "gpu":  # whose libraries write sums out before the scales come
            kind = jnp.float32
        last = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(numbers, self.array, last, preferred_element_type=kind)

    def _by_parts(self, x: Float[Array, "R D_in"]) -> Float[Array, "R D_out"]:
        """The product with some numbers of every channel at a time."""
        (rows, columns), along = self.shape, int(self.scheme.activations)
        most = max(1, CPU_BYTES // (4 * columns))  # and a divisor, so that parts are alike
        count = next(n for n in range(min(rows, most), 0, -1) if rows % n == 0)

        def add(total, start):
            part = jax.lax.dynamic_slice_in_dim(self.array, start, count, along).astype(x.dtype)
            here = jax.lax.dynamic_slice_in_dim(x, start, count, axis=1)
            sums = (((1,), (along,)), ((), ()))
            found = jax.lax.dot_general(here, part, sums, preferred_element_type=jnp.float32)
            return total + found, None

        nothing = jnp.zeros((len(x), columns), jnp.float32)
        return jax.lax.scan(add, nothing, jnp.arange(0, rows, count))[0]

    def shapes(self, dtype) -> "Quantized":
        array, scale = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (self.array, self.scale))
        return replace(self, array=array, scale=scale, dtype=jnp.dtype(dtype))


def is_one(leaf: object) -> bool:
    """Whether this is a matrix in 8 bits."""
    return isinstance(leaf, Quantized)


def scheme_of_rows(transformer: nnx.Module) -> Scheme | None:
    """The scheme that brings rows of activations into 8 bits; None: they stay as they are."""
    kernel = transformer.head.kernel.get_value()
    return kernel.scheme if is_one(kernel) and kernel.scheme.activations else None


# --- making them --------------------------------------------------------------------------------


def quantize(matrix: Leaf, scheme: Scheme = SCHEMES[INT8], dtype=None) -> Quantized:
    """A matrix, or those of all layers, in 8 bits: layer by layer and on the host, so that neither
    a device nor the host ever holds all of them in float32 as well. Those in a file stay there.

    dtype: of the matrix that it stands for; None: the matrix's own. Shapes stay shapes.
    """
    *layers, _, d_out = matrix.shape
    kind, shape = jnp.dtype(dtype or matrix.dtype), schemes.shape_of_numbers(matrix.shape, scheme)
    if isinstance(matrix, jax.ShapeDtypeStruct):
        scale = jax.ShapeDtypeStruct((*layers, d_out), jnp.float32)
        return Quantized(jax.ShapeDtypeStruct(shape, scheme.dtype), scale, kind, scheme)
    if isinstance(matrix, Stored):
        return Quantized(*schemes.of_stored(matrix, scheme), kind, scheme)
    return Quantized(*schemes.convert(matrix, scheme), kind, scheme)


def matrices(transformer: nnx.Module) -> dict[str, nnx.Variable]:
    """{name: parameter} of what is stored in 8 bits: the matrices of the linear layers in the
    blocks, and of the head. Embeddings, norms and biases are not among them."""
    blocks = vars(transformer.blocks).items()
    linear = {f"blocks/{n}": layer for n, layer in blocks if isinstance(layer, nnx.Linear)}
    linear["head"] = transformer.head
    return {f"{name}/kernel": layer.kernel for name, layer in linear.items()}


def convert(transformer: nnx.Module, scheme: Scheme = SCHEMES[INT8]) -> None:
    """Replaces its matrices (`matrices`) by 8-bit ones, stacked, parameter by parameter. Arrays of
    a device go back to the default device. `UserError`: the widths of a matrix do not fit the
    scheme; nothing is replaced then."""
    wanted = matrices(transformer)
    for name, variable in wanted.items():
        check_widths(scheme, name, variable.get_value().shape)
    for variable in wanted.values():
        value = variable.get_value()
        value = arrange.whole(value)
        found = quantize(value, scheme)
        variable.set_value(jax.tree.map(jnp.asarray, found) if isinstance(value, Array) else found)
