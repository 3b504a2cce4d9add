"""Layers of a transformer: stacked along a leading axis of every parameter, as checkpoints have
them, or their weights as separate arrays (`varjax.fast.arrange` says when).
"""

from collections.abc import Callable, Iterator
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
    for one in _each(layers):
        carry = body(carry, one)
    return carry


def scan_numbered(body: Callable[[T, PyTree, Array], T], carry: T, layers: PyTree) -> T:
    """`scan` of a body that takes the layer's number, too: `carry = body(carry, layer, number)`."""
    if is_separate(layers):
        body = jax.jit(body)
        for number, one in enumerate(_each(layers)):
            # a constant: counted in the carry, it would be another body where the next is not used
            carry = body(carry, one, np.int32(number))
        return carry

    # counted: taken from an array of numbers, each would be a kernel of its own
    def counted(carry: tuple[T, Array], one: PyTree) -> tuple[T, Array]:
        return body(carry[0], one, carry[1]), carry[1] + 1

    return scan(counted, (carry, jnp.int32(0)), layers)[0]


def _each(layers: PyTree) -> Iterator[PyTree]:
    """The layers, of which some weights are separate, one after another."""
    leaves = jax.tree.leaves(layers, is_leaf=is_one)
    return (layer(layers, i) for i in range(next(len(leaf) for leaf in leaves if is_one(leaf))))
