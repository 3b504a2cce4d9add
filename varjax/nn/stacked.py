"""Layers of a transformer: stacked along a leading axis of every parameter, as checkpoints have
them, or their weights as separate arrays.

A scan over stacked weights is one compiled body, but GPU and CPU programs copy each layer's weights
out of the stack before they multiply with them, every time the body runs. Products read separate
arrays where they lie; every layer is then a body of its own, which takes longer to compile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree

from varjax.nn import quantized
from varjax.nn.quantized import Leaf, Quantized
from varjax.nn.stored import Stored

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turned:
    """A matrix [D_in, D_out] that lies in memory as [D_out, D_in]."""

    array: Leaf

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[::-1]

    dtype = property(attrgetter("array.dtype"))

    def product(self, x: Float[Array, "... D_in"], dtype=None) -> Float[Array, "... D_out"]:
        """`x @ matrix`, with the matrix as the left operand. dtype: of the result; None: its
        own."""
        flat = x.reshape(-1, x.shape[-1])
        found = jax.lax.dot_general(self.array, flat, (((1,), (1,)), ((), ())))
        # without the barrier XLA turns the product and its operands back again
        found = jax.lax.optimization_barrier(found).T.reshape(*x.shape[:-1], -1)
        return found.astype(dtype or found.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Separate:
    """Value of a parameter whose layers are arrays of their own, `Turned` or `Quantized` ones."""

    parts: tuple[Leaf | Turned | Quantized, ...]

    def __getitem__(self, index: int) -> Leaf | Turned | Quantized:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the stacked array would have."""
        return (len(self), *self.parts[0].shape)

    @property
    def dtype(self):
        return self.parts[0].dtype

    def stacked(self) -> Leaf | Quantized:
        """One array, or its shape."""
        found = jax.tree.map(lambda *layers: quantized.stack(layers), *self.parts)
        if not isinstance(found, Turned):
            return found
        found = found.array
        if isinstance(found, Stored):  # the layers as they lie in the file, not turned
            return found
        if isinstance(found, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        return found.swapaxes(1, 2)


def stack(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """Builds `num_layers` modules with one vmapped initialisation: every parameter gains a leading
    layer axis."""
    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(num_layers))


def product_bytes(blocks: nnx.Module, once: tuple[str, ...] = ()) -> int:
    """Bytes of the parameters that `separate` takes apart, stacked or not."""
    leaves = jax.tree.leaves([v.get_value() for v in _parameters(blocks, once)])
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def is_separate(tree: PyTree) -> bool:
    """Whether any weights in a tree of layers' inputs are separate."""
    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def is_one(leaf: object) -> bool:
    """Whether this is the value of a parameter in separate arrays."""
    return isinstance(leaf, Separate)


def separate(blocks: nnx.Module, once: tuple[str, ...] = (), *, turned: bool = False) -> None:
    """Replaces stacked parameters of linear layers by an array per layer. This is done one
    parameter after the other, so that only one of them exists twice. Shapes stay shapes; arrays on
    the host become views.

    once: linear layers that stay stacked, because all layers use them together, once per image.
    turned: whether float32 matrices are turned, for a CPU. Those in 8 bits are not.
    """
    for variable in _parameters(blocks, once):
        value = variable.get_value()
        turn = turned and value.dtype == jnp.float32 and len(value.shape) == 3
        turn = turn and not quantized.is_one(value[0] if is_one(value) else value)
        if is_one(value) and isinstance(value[0], Turned) == turn:
            continue
        value = value.stacked() if is_one(value) else value
        variable.set_value(Separate(tuple(_part(value, i, turn) for i in range(value.shape[0]))))


def _part(value: Leaf | Quantized, index: int, turn: bool) -> Leaf | Turned | Quantized:
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
            variable.set_value(value.stacked())


def layer(tree: PyTree, index: int) -> PyTree:
    """Layer `index` of stacked modules and arrays."""
    return jax.tree.map(lambda leaf: leaf[index], tree, is_leaf=is_one)


def scan(body: Callable[[T, PyTree], T], carry: T, layers: PyTree) -> T:
    """`carry` after `carry = body(carry, layer)` for all layers. This is a `lax.scan`; where
    weights are separate, it is one layer after the other."""
    if not is_separate(layers):
        return jax.lax.scan(lambda c, x: (body(c, x), None), carry, layers)[0]
    body = jax.jit(body)  # traced and lowered once, compiled for every layer
    leaves = jax.tree.leaves(layers, is_leaf=is_one)
    for index in range(next(len(leaf) for leaf in leaves if is_one(leaf))):
        carry = body(carry, layer(layers, index))
    return carry


def _parameters(blocks: nnx.Module, without: tuple[str, ...] = ()) -> list[nnx.Variable]:
    """Parameters of the linear layers, which lie apart. Vectors are not among them: kernels read
    them for all layers, so they stay stacked."""
    linear = (p for n, p in vars(blocks).items() if isinstance(p, nnx.Linear) and n not in without)
    return [v for p in linear for v in (p.kernel, p.bias) if isinstance(v, nnx.Variable)]
