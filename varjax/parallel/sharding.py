"""Generation over several devices: one program, run by every device on its share.

`data` splits the images of a batch, and nothing is exchanged. `model` splits heads and the width of
the feed-forward: every device has a pool of its own for its heads, and two sums per layer are
exchanged. An image does not depend on how a batch is split.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from varjax import logical_axes
from varjax.logical_axes import DATA, IMAGES, MODEL, mesh_specs
from varjax.nn.stacked import Leaf
from varjax.parallel import processes, weights
from varjax.parallel.split import MeshSpec

Tree = TypeVar("Tree")  # anything that JAX takes for a tree of arrays


def make_mesh(spec: MeshSpec, devices: Sequence[jax.Device]) -> Mesh:
    """Return the first devices as a mesh with the axes data and model."""
    return logical_axes.make_mesh({DATA: spec.data, MODEL: spec.model}, devices)


@dataclass(frozen=True, eq=False)
class ShardedProgram:
    """The program of a `ScaleSpec` or `TokenSpec` (`varjax.engine`) for a mesh.

    specs: `PartitionSpec`s of the arguments (networks, state, condition, keys, inputs, given).
    """

    mesh: Mesh
    spec: Any
    specs: tuple

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        spec: Any,
        networks: Mapping[str, nnx.Module],
        state: PyTree[P],
        inputs: tuple,
        given: PyTree,
    ) -> "ShardedProgram":
        """Divide every array by the names of its axes (`varjax.logical_axes.RULES`).

        networks, given: may be shapes.
        state, inputs: trees of names (`plans.state_names`, `ScaleSpec.input_names`).
        """
        images = P(IMAGES)
        given = jax.tree.map(lambda _: images, given)
        names = (weights.names(networks), state, images, images, inputs, given)
        return cls(mesh, spec, mesh_specs(names, mesh.axis_names))

    def __call__(self, *arguments):
        state = self.specs[1]

        def run(networks, *local):
            if self.mesh.shape[MODEL] > 1:
                divided = networks["transformer"].over(MODEL)
                networks = {**networks, "transformer": divided}
            return self.spec.generate(networks, *local)

        names = ["tokens", "code_map"] + ["logits"] * self.spec.options.keep_logits
        results = {name: P(DATA) for name in names}
        return self._on_mesh(run, self.specs, (results, state))(*arguments)

    def _on_mesh(self, function, in_specs, out_specs):
        # Unchecked: results along `model` are equal on all devices because of the sums per layer.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def place_shapes(self, which: int | slice, arguments: Tree) -> Tree:
        """Return shapes of some arguments, placed on the mesh. which: their place in `specs`."""
        places = jax.tree.broadcast(self.shardings[which], arguments)
        return jax.tree.map(
            lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
            arguments,
            places,
        )

    def over_images(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Make every device along `data` run `function(networks, array [B, ...]) -> array [B, ...]`
        for its own images."""
        return self._on_mesh(function, (self.specs[0], P(DATA)), P(DATA))

    @cached_property
    def shardings(self) -> tuple:
        """The `NamedSharding` of every argument."""
        return jax.tree.map(
            partial(NamedSharding, self.mesh), self.specs, is_leaf=lambda s: isinstance(s, P)
        )


def place(arrays: Tree, shardings: PyTree[NamedSharding]) -> Tree:
    """Put arrays on a mesh. With several processes each of them has all of every array, and hands
    over its own devices' parts."""
    if processes.count() == 1:
        return jax.device_put(arrays, shardings)

    def placed(array: Leaf, where: NamedSharding) -> Leaf:
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):  # which are not NumPy's
            kind = jax.random.key_impl(array)
            return jax.random.wrap_key_data(placed(jax.random.key_data(array), where), impl=kind)
        held = np.asarray(array)
        return jax.make_array_from_callback(held.shape, where, lambda part: held[part])

    return jax.tree.map(placed, arrays, jax.tree.broadcast(shardings, arrays))
