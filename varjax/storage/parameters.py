"""Parameters of a module by name: the one place that knows how Flax lays them out.

Names are '/'-joined paths such as `blocks/qkv/kernel`; stacked layers are one leaf with a leading
layer axis.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from varjax.core.layers import is_matrix
from varjax.fast import arrange


def abstract(network: Callable[..., nnx.Module], config) -> nnx.Module:
    """The module `network(config, rngs=...)`, holding shapes and types: nothing is allocated."""
    return nnx.merge(*_abstract(network, config), copy=True)


@lru_cache(maxsize=32)
def _abstract(network, config):
    """Structure and abstract state. They are kept, because tracing a deep codec takes long."""
    return nnx.split(nnx.eval_shape(lambda: network(config, rngs=nnx.Rngs(0))))


def named(module: nnx.Module) -> dict:
    """{name: leaf} of a module, concrete or abstract; layers that lie apart are stacked."""
    found = flatten_dict(nnx.to_pure_dict(nnx.split(module)[1]))
    return {"/".join(map(str, path)): arrange.whole(leaf) for path, leaf in found.items()}


def fill(module: nnx.Module, arrays: Mapping) -> nnx.Module:
    """A module like `module` (concrete or abstract) with {name: array} as its parameters.

    The names must be exactly the names of `named(module)`; callers report differences before.
    """
    graph, state = nnx.split(module)
    filled = {
        path: arrays["/".join(map(str, path))] for path in flatten_dict(nnx.to_pure_dict(state))
    }
    nnx.replace_by_pure_dict(state, unflatten_dict(filled))
    return nnx.merge(graph, state)


def count(module: nnx.Module) -> int:
    """Number of parameters."""
    return sum(int(np.prod(leaf.shape)) for leaf in named(module).values())


def shapes(module: nnx.Module, dtype) -> nnx.Module:
    """The module with shapes in place of arrays, floating ones in `dtype`. Matrices in 8 bits stay
    so, and stand for matrices in `dtype`."""

    def shape(leaf):
        if is_matrix(leaf):
            return leaf.shapes(dtype)
        kind = dtype if is_floating(leaf.dtype) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(kind))

    return jax.tree.map(shape, module, is_leaf=is_matrix)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes on one device while a program runs: its arguments (the weights that it reads among
    them), its results and its temporaries."""
    stats = compiled.memory_analysis()
    own = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return own + stats.output_size_in_bytes - stats.alias_size_in_bytes


def default_dtype() -> str:
    """The usual type of weights: bfloat16 on accelerators, float32 on a CPU, where bfloat16 is not
    faster."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def is_floating(dtype) -> bool:
    """True for float32, bfloat16 and the like."""
    return jnp.issubdtype(dtype, jnp.floating)
