"""How the weights of a transformer's layers lie: stacked or apart, as they are or turned.

A scan over stacked weights is one compiled body, but GPU and CPU programs copy each layer's weights
out of the stack before they multiply with them, every time the body runs. Products read separate
arrays where they lie; every layer is then a body of its own, which takes longer to compile.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from varjax.core.layers import Activation, Matrix, is_matrix
from varjax.core.stacked import Separate, is_one
from varjax.fast.stored import Leaf, Stored


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turned(Matrix):
    """A matrix [D_in, D_out] that lies in memory as [D_out, D_in]."""

    array: Leaf

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[::-1]

    dtype = property(attrgetter("array.dtype"))

    def product(
        self,
        x: Float[Array, "... D_in"],
        dtype=None,
        axis: str | None = None,
        activation: Activation | None = None,
    ) -> Float[Array, "... D_out"]:
        """`x @ matrix`, with the matrix on the left. dtype: of the result; None: its own."""
        x = activation(x) if activation else x
        flat = x.reshape(-1, x.shape[-1])
        found = jax.lax.dot_general(self.array, flat, (((1,), (1,)), ((), ())))
        # without the barrier XLA turns the product and its operands back again
        found = jax.lax.optimization_barrier(found).T.reshape(*x.shape[:-1], -1)
        return found.astype(dtype or found.dtype)

    def by_axis(self, function: Callable[[Leaf, int | None], object], axis: int | None) -> "Turned":
        return Turned(function(self.array, axis if axis is None else 1 - axis))

    def shapes(self, dtype) -> "Turned":
        return Turned(jax.ShapeDtypeStruct(self.array.shape, jnp.dtype(dtype)))


def product_bytes(blocks: nnx.Module, once: tuple[str, ...] = ()) -> int:
    """Bytes of the parameters that `separate` takes apart, stacked or not."""
    leaves = jax.tree.leaves([v.get_value() for v in _parameters(blocks, once)])
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def separate(blocks: nnx.Module, once: tuple[str, ...] = (), *, turned: bool = False) -> None:
    """Replaces stacked parameters of linear layers by an array per layer. This is done one
    parameter after the other, so that only one of them exists twice. Shapes stay shapes; arrays on
    the host become views.

    once: linear layers that stay stacked, because all layers use them together, once per image.
    turned: whether float32 matrices are turned, for a CPU. Those in 8 bits are not.
    """
    for variable in _parameters(blocks, once):
        value = variable.get_value()
        first = value[0] if is_one(value) else value
        lies_turned = isinstance(first, Turned)
        turn = turned and value.dtype == jnp.float32 and len(value.shape) == 3
        turn = turn and (lies_turned or not is_matrix(first))
        if is_one(value) and lies_turned == turn:
            continue
        value = whole(value)
        variable.set_value(Separate(tuple(_part(value, i, turn) for i in range(value.shape[0]))))


def _part(value: Leaf | Matrix, index: int, turn: bool) -> Leaf | Matrix:
    """Layer `index` of a stacked parameter."""

    def one(leaf: Leaf) -> Leaf:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            shape = leaf.shape[1:]
            return jax.ShapeDtypeStruct(shape[::-1] if turn else shape, leaf.dtype)
        part = leaf[index].T if turn else leaf[index]
        # a view would lie as before
        return np.ascontiguousarray(part) if turn and isinstance(part, np.ndarray) else part

    found = jax.tree.map(one, value)
    return Turned(found) if turn else found


def restack(blocks: nnx.Module) -> None:
    """The inverse of `separate`."""
    for variable in _parameters(blocks):
        if is_one(value := variable.get_value()):
            variable.set_value(whole(value))


def whole(value: Leaf | Matrix | Separate) -> Leaf | Matrix:
    """The value of a parameter with its layers as one array, or its shape."""
    if not is_one(value):
        return value
    found = jax.tree.map(lambda *layers: _stack(layers), *value.parts)
    if not isinstance(found, Turned):
        return found
    found = found.array
    if isinstance(found, Stored):  # the layers as they lie in the file, not turned
        return found
    if isinstance(found, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return found.swapaxes(1, 2)


def _stack(leaves: Sequence[Leaf]) -> Leaf:
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    if isinstance(first, Stored):
        return first.origin
    return np.stack(leaves) if isinstance(first, np.ndarray) else jnp.stack(leaves)


def _parameters(blocks: nnx.Module, without: tuple[str, ...] = ()) -> list[nnx.Variable]:
    """Parameters of the linear layers, which lie apart. Vectors are not among them: kernels read
    them for all layers, so they stay stacked."""
    linear = (p for n, p in vars(blocks).items() if isinstance(p, nnx.Linear) and n not in without)
    return [v for p in linear for v in (p.kernel, p.bias) if isinstance(v, nnx.Variable)]
