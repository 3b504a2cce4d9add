"""Matrices of linear layers in 8 bits: int8 numbers, and a float32 scale for every output channel.

Only weights are stored so. A product converts them to the type of its input on the way and runs in
that type; its result is multiplied by the scales. A device therefore never holds a matrix in a
floating type: TPU and Triton products convert as they read (docs/lab/int8_weights.md), and on a CPU
a product takes some rows of the matrix at a time.

    matrix[i, o] = scale[o] * array[i, o],  scale[o] = max over i of |matrix[i, o]| / 127
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import target

Leaf = Array | np.ndarray | jax.ShapeDtypeStruct  # a parameter of a network, with or without values
INT8 = "int8"
LARGEST = 127  # symmetric: -128 is not used
# Bytes of the rows that a CPU converts at a time: few enough to stay in its caches. Its compiler
# would convert all matrices before the first token, and keep them.
CPU_BYTES = 2**20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A matrix [D_in, D_out] in 8 bits, or the matrices of all layers. It may be abstract.

    dtype: the type of the matrix that it stands for, in which products run.
    """

    array: Leaf
    scale: Leaf
    dtype: np.dtype = field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def layer(self, index: int) -> "Quantized":
        """The matrix of one layer of several."""
        return jax.tree.map(lambda leaf: _layer(leaf, index), self)

    @classmethod
    def stack(cls, layers: Sequence["Quantized"]) -> "Quantized":
        """The inverse of `layer`."""
        return jax.tree.map(lambda *leaves: stack(leaves), *layers)

    def product(self, x: Float[Array, "... D_in"], dtype=None) -> Float[Array, "... D_out"]:
        """`x @ matrix`, summed up in float32. dtype: of the result; None: of `x`."""
        rows = x.reshape(-1, x.shape[-1])
        sums = self._by_rows(rows) if target.platform() == "cpu" else self._at_once(rows)
        found = sums * self.scale
        return found.astype(dtype or x.dtype).reshape(*x.shape[:-1], -1)

    def _at_once(self, x: Float[Array, "R D_in"]) -> Float[Array, "R D_out"]:
        return jnp.dot(x, self.array.astype(x.dtype), preferred_element_type=jnp.float32)

    def _by_rows(self, x: Float[Array, "R D_in"]) -> Float[Array, "R D_out"]:
        rows, columns = self.shape
        count = _divisor(rows, max(1, CPU_BYTES // (4 * columns)))

        def add(total, start):
            part = jax.lax.dynamic_slice_in_dim(self.array, start, count)
            here = jax.lax.dynamic_slice_in_dim(x, start, count, axis=1)
            found = jnp.dot(here, part.astype(x.dtype), preferred_element_type=jnp.float32)
            return total + found, None

        nothing = jnp.zeros((len(x), columns), jnp.float32)
        return jax.lax.scan(add, nothing, jnp.arange(0, rows, count))[0]

    def shapes(self, dtype) -> "Quantized":
        """The same without numbers, for products in `dtype`."""
        array, scale = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (self.array, self.scale))
        return Quantized(array, scale, jnp.dtype(dtype))

    def matrix(self) -> Float[np.ndarray, "*L D_in D_out"]:
        """float32, on the host: what the numbers stand for."""
        scale = np.asarray(self.scale)[..., None, :]
        return np.asarray(self.array).astype(np.float32) * scale


def stack(leaves: Sequence[Leaf]) -> Leaf:
    """Arrays of layers as one array, or its shape."""
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    return np.stack(leaves) if isinstance(first, np.ndarray) else jnp.stack(leaves)


def _layer(leaf: Leaf, index: int) -> Leaf:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[index]


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number up to `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def is_one(leaf: object) -> bool:
    """Whether this is a matrix in 8 bits."""
    return isinstance(leaf, Quantized)


def quantize(matrix: Leaf, dtype=None) -> Quantized:
    """A matrix, or those of all layers, in 8 bits: layer by layer and on the host, so that neither
    a device nor the host ever holds all of them in float32 as well.

    dtype: in which products will run; None: the matrix's own. Shapes stay shapes, arrays become
    NumPy arrays.
    """
    *layers, d_in, d_out = matrix.shape
    kind = jnp.dtype(dtype or matrix.dtype)
    if isinstance(matrix, jax.ShapeDtypeStruct):
        scale = jax.ShapeDtypeStruct((*layers, d_out), jnp.float32)
        return Quantized(jax.ShapeDtypeStruct(matrix.shape, jnp.int8), scale, kind)
    array = np.empty(matrix.shape, np.int8)
    scale = np.empty((*layers, d_out), np.float32)
    for index in np.ndindex(*layers):
        array[index], scale[index] = _of_layer(np.asarray(matrix[index], np.float32))
    return Quantized(array, scale, kind)


def _of_layer(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(matrix).max(0, initial=0) / np.float32(LARGEST)
    scale = np.where(scale > 0, scale, np.float32(1))  # a channel of zeros, or of tiny numbers
    return np.clip(np.rint(matrix / scale), -LARGEST, LARGEST).astype(np.int8), scale


def matrices(transformer: nnx.Module) -> dict[str, nnx.Variable]:
    """{name: parameter} of what is stored in 8 bits: the matrices of the linear layers in the
    blocks, and of the head. Embeddings, norms and biases are not among them."""
    blocks = vars(transformer.blocks).items()
    linear = {f"blocks/{n}": layer for n, layer in blocks if isinstance(layer, nnx.Linear)}
    linear["head"] = transformer.head
    return {f"{name}/kernel": layer.kernel for name, layer in linear.items()}


def convert(transformer: nnx.Module) -> None:
    """Replace its matrices (`matrices`) by 8-bit ones, stacked, parameter by parameter. Arrays of a
    device go back to the default device."""
    for variable in matrices(transformer).values():
        value = variable.get_value()
        value = value if hasattr(value, "ndim") else value.stacked()  # layers that lie apart
        found = quantize(value)
        variable.set_value(jax.tree.map(jnp.asarray, found) if isinstance(value, Array) else found)
