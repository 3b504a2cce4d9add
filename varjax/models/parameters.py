"""Parameters of a module by name: the one place that knows how Flax lays them out.

Names are '/'-joined paths such as `blocks/qkv/kernel`; stacked layers are one leaf with a leading
layer axis.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx


def abstract(build: Callable[[], nnx.Module]) -> nnx.Module:
    """The module that `build` makes, holding shapes and types: nothing is allocated."""
    return nnx.eval_shape(build)


def named(module: nnx.Module) -> dict:
    """{name: leaf} of a module, concrete or abstract."""
    return flattened(_pure(module))


def fill(module: nnx.Module, arrays: Mapping) -> nnx.Module:
    """A module like `module` (concrete or abstract) with {name: array} as its parameters.

    Names must be exactly those of `named(module)`; callers report differences before.
    """
    graph, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, _replaced(_pure(module), arrays))
    return nnx.merge(graph, state)


def nested(arrays: Mapping) -> dict:
    """{"a/b": x} -> {"a": {"b": x}}."""
    tree: dict = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


def flattened(tree: Mapping) -> dict:
    """{"a": {"b": x}} -> {"a/b": x}."""
    found = {}
    for key, value in tree.items():
        inner = flattened(value) if isinstance(value, Mapping) else {"": value}
        found |= {f"{key}/{name}".removesuffix("/"): leaf for name, leaf in inner.items()}
    return found


def count(module: nnx.Module) -> int:
    """Number of parameters."""
    return sum(int(np.prod(leaf.shape)) for leaf in named(module).values())


def is_floating(dtype) -> bool:
    """True for float32, bfloat16 and the like."""
    return jnp.issubdtype(dtype, jnp.floating)


def _pure(module: nnx.Module) -> dict:
    return nnx.to_pure_dict(nnx.split(module)[1])


def _replaced(tree: Mapping, arrays: Mapping, prefix: str = "") -> dict:
    """`tree` with its own keys, which may be numbers, and the arrays of those names as leaves."""
    return {
        key: _replaced(value, arrays, f"{prefix}{key}/")
        if isinstance(value, Mapping)
        else arrays[f"{prefix}{key}"]
        for key, value in tree.items()
    }
