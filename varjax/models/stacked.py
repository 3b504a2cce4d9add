"""Layers of a transformer: stacked along a leading axis of every parameter, as checkpoints have
them, or their large weights as separate arrays.

A scan over stacked weights is one compiled body, but GPU and CPU programs copy each layer's weights
out of the stack before they multiply with them, every time the body runs. Products read separate
arrays where they lie; every layer is then a body of its own, which takes longer to compile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

LARGE = 2**20  # bytes of a layer's part: smaller ones are cut out within the kernels that read them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Separate:
    """Value of a parameter whose layers are arrays of their own."""

    parts: tuple[Any, ...]

    def __getitem__(self, index: int) -> Any:
        return self.parts[index]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """As if stacked."""
        return (len(self), *self.parts[0].shape)

    @property
    def dtype(self):
        return self.parts[0].dtype

    def stacked(self) -> Any:
        """One array, or its shape."""
        if isinstance(self.parts[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        return jnp.stack(self.parts)


def stack(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """Build `num_layers` modules with one vmapped initialisation: every parameter gains a leading
    layer axis."""
    return nnx.vmap(make, in_axes=0, out_axes=0)(
        rngs.split(num_layers) if hasattr(rngs, "split") else rngs.fork(split=num_layers)
    )


def large_bytes(blocks: nnx.Module, once: tuple[str, ...] = ()) -> int:
    """Bytes of the weights that `separate` takes apart, stacked or not."""
    values = (v.get_value() for v in _variables(blocks, once))
    return sum(_bytes(part) for value in values for part in _large_parts(value))


def is_separate(tree: Any) -> bool:
    """Whether any weights of a module, or of a tree of layers' inputs, are separate."""
    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def is_one(leaf: Any) -> bool:
    return isinstance(leaf, Separate)


def separate(blocks: nnx.Module, once: tuple[str, ...] = ()) -> None:
    """Replace large stacked weights by an array per layer: one parameter after the other, so that
    only one exists twice. Shapes stay shapes, arrays of the host views.

    once: parts of the blocks that stay: all layers use them together, once per image.
    """
    for variable in _variables(blocks, once):
        if parts := _large_parts(variable.get_value()):
            variable.set_value(Separate(parts))


def restack(blocks: nnx.Module) -> None:
    """The inverse of `separate`."""
    for variable in _variables(blocks):
        if is_one(value := variable.get_value()):
            variable.set_value(value.stacked())


def layer(tree: Any, index: int) -> Any:
    """Layer `index` of stacked modules and arrays."""
    return jax.tree.map(lambda leaf: leaf[index], tree, is_leaf=is_one)


def scan(body: Callable, carry: Any, layers: Any, *, unroll: bool = False) -> Any:
    """`carry` after `carry = body(carry, layer)` for all layers: a `lax.scan`, or if weights are
    separate one layer after the other."""
    if not is_separate(layers):
        return jax.lax.scan(lambda c, x: (body(c, x), None), carry, layers, unroll=unroll)[0]
    body = jax.jit(body)  # traced and lowered once, compiled for every layer
    for index in range(_count(layers)):
        carry = body(carry, layer(layers, index))
    return carry


def _count(layers: Any) -> int:
    leaves = jax.tree.leaves(layers, is_leaf=is_one)
    return next(len(leaf) for leaf in leaves if is_one(leaf))


def _variables(module: nnx.Module, without: tuple[str, ...] = ()) -> list[nnx.Variable]:
    def within(tree):
        leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
        return [leaf for leaf in leaves if isinstance(leaf, nnx.Variable)]

    left = {id(v) for name in without for v in within(getattr(module, name, None))}
    return [v for v in within(module) if id(v) not in left]


def _large_parts(value: Any) -> tuple:
    """Of a parameter's value, an array or shape per layer; nothing where these are small."""
    if is_one(value):
        return value.parts
    if isinstance(value, jax.ShapeDtypeStruct):
        part = jax.ShapeDtypeStruct(value.shape[1:], value.dtype)
        return (part,) * value.shape[0] if _bytes(part) >= LARGE else ()
    if value.nbytes < LARGE * value.shape[0]:
        return ()
    return tuple(value[i] for i in range(value.shape[0]))


def _bytes(part: Any) -> int:
    return part.size * part.dtype.itemsize
