"""Layers of a transformer: stacked along a leading axis of every parameter, as checkpoints have
them, or their weights as separate arrays (`varjax.fast.arrange` says when).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Separate:
    """Value of a parameter whose layers are values of their own: arrays, or each a
    `layers.Matrix`."""

    parts: tuple

    def __getitem__(self, index: int):
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


def stack(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """Builds `num_layers` modules by one vmapped call: parameters gain a leading axis of layers."""
    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(num_layers))


def is_separate(tree: PyTree) -> bool:
    """Whether any weights in a tree of layers' inputs are separate."""
    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def is_one(leaf: object) -> bool:
    """Whether this is the value of a parameter in separate arrays."""
    return isinstance(leaf, Separate)


def layer(tree: PyTree, index: int) -> PyTree:
    """Layer `index` of stacked modules and arrays."""
    return jax.tree.map(lambda leaf: leaf[index], tree, is_leaf=is_one)


def scan(body: Callable[[T, PyTree], T], carry: T, layers: PyTree) -> T:
    """`carry` after `carry = body(carry, layer)` for all layers. This is a `lax.scan`; where
    weights are separate, it is one layer after the other."""
    if not is_separate(layers):
        return jax.lax.scan(lambda c, x: (body(c, x), None), carry, layers)[0]
    body = jax.jit(body)  # traced and lowered once, compiled for every layer
    for index in range(_depth(layers)):
        carry = body(carry, layer(layers, index))
    return carry


def scan_numbered(body: Callable[[T, PyTree, Array], T], carry: T, layers: PyTree) -> T:
    """`scan` of a body that takes the layer's number, too: `carry = body(carry, layer, number)`."""
    if is_separate(layers):
        # Constants: counted in the carry, the number after the last one would not be used, and the
        # last layer's body would be another one.
        def numbered(carry: T, given: tuple[PyTree, Array]) -> T:
            return body(carry, *given)

        numbers = Separate(tuple(map(np.int32, range(_depth(layers)))))
        return scan(numbered, carry, (layers, numbers))

    # Taken from an array of numbers, each would be a kernel of its own.
    def counted(carry: tuple[T, Array], given: PyTree) -> tuple[T, Array]:
        carry, number = carry
        return body(carry, given, number), number + 1

    return scan(counted, (carry, jnp.int32(0)), layers)[0]


def _depth(layers: PyTree) -> int:
    """The number of layers, of which some weights are separate."""
    leaves = jax.tree.leaves(layers, is_leaf=is_one)
    return next(len(leaf) for leaf in leaves if is_one(leaf))
