"""Generation over several devices: one program, run by every device on its share.

`data` splits the images of a batch: nothing is exchanged. `model` splits heads and the width of the
feed-forward; every device has a pool of its own for its heads, and two sums per layer are
exchanged. An image does not depend on how a batch is split.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from varjax.nn.split import Split
from varjax.parallel.split import AXES, MeshSpec

DATA, MODEL = AXES


def make_mesh(spec: MeshSpec, devices) -> Mesh:
    """The first devices as a mesh with the axes data and model."""
    return Mesh(np.array(devices[: spec.num_devices]).reshape(spec.shape), AXES)


def map_weights(function, networks: Any) -> Any:
    """`function(array, Split or None)` of every array of the networks."""
    splits = networks["transformer"].splits()
    splits = {f"transformer.blocks.{name}": split for name, split in splits.items()}

    def of(path, leaf):
        keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        end = keys.index("value") if "value" in keys else len(keys)
        split = splits.get(".".join(keys[:end]))
        if split and keys[end + 1 :]:  # the weights of one layer, which lack the axis of the layers
            split = dataclasses.replace(split, axis=split.axis - 1)
        return function(leaf, split)

    return jax.tree_util.tree_map_with_path(of, networks)


def count(networks: Any, parts: int) -> int:
    """Parameters of one device, if `parts` of them share the divided ones."""
    sizes = map_weights(lambda a, split: math.prod(a.shape) // (parts if split else 1), networks)
    return sum(jax.tree.leaves(sizes))


def _weight_specs(networks: Any, parts: int) -> Any:
    def spec_of(leaf, split: Split | None):
        if split is None or parts == 1:
            return P()
        return P(*(MODEL if axis == split.axis else None for axis in range(leaf.ndim)))

    return map_weights(spec_of, networks)


class ProgramSpec(Protocol):
    """The static side of a program that draws codes (`varjax.engine.drawing`)."""

    keep_logits: bool

    def generate(self, networks, state, condition, keys, inputs, given):
        """Draw a batch: results by name, and the final cache."""
        ...


@dataclass(frozen=True, eq=False)
class ShardedProgram:
    """The program of a `ProgramSpec` for a mesh.

    specs: `PartitionSpec`s of the arguments (networks, state, condition, keys, inputs, given).
    """

    mesh: Mesh
    spec: ProgramSpec
    specs: tuple

    @classmethod
    def of(
        cls, mesh: Mesh, spec: ProgramSpec, networks, state_specs, input_specs, given
    ) -> "ShardedProgram":
        """Divide weights and whatever has images; `given` and `networks` may be shapes."""
        weights = _weight_specs(networks, mesh.shape[MODEL])
        given = jax.tree.map(lambda _: P(DATA), given)
        return cls(mesh, spec, (weights, state_specs, P(DATA), P(DATA), input_specs, given))

    def __call__(self, *arguments):
        state = self.specs[1]

        def run(networks, *local):
            if self.mesh.shape[MODEL] > 1:
                divided = networks["transformer"].over(MODEL)
                networks = {**networks, "transformer": divided}
            return self.spec.generate(networks, *local)

        names = ["tokens", "code_map"] + ["logits"] * self.spec.keep_logits
        results = {name: P(DATA) for name in names}
        return self._on_mesh(run, self.specs, (results, state))(*arguments)

    def _on_mesh(self, function, in_specs, out_specs):
        # Unchecked: results along `model` are equal on all devices because of the sums per layer.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def place_shapes(self, which: int | slice, arguments: Any) -> Any:
        """Shapes of some arguments (by their place in `specs`), placed on the mesh."""
        places = jax.tree.broadcast(self.shardings[which], arguments)
        return jax.tree.map(
            lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
            arguments,
            places,
        )

    def over_images(self, function):
        """`function(networks, array [B, ...]) -> array [B, ...]`, every device along `data` for
        its images."""
        return self._on_mesh(function, (self.specs[0], P(DATA)), P(DATA))

    @cached_property
    def shardings(self) -> tuple:
        """`NamedSharding` of every argument."""
        return jax.tree.map(
            partial(NamedSharding, self.mesh), self.specs, is_leaf=lambda s: isinstance(s, P)
        )


def place_weights(networks: Any, spec: MeshSpec, shardings: Any) -> Any:
    """The networks on the mesh, array by array: the sections of side-by-side parameters (queries,
    keys, values) interleaved so that every device's share is contiguous. The host does it, so that
    no device holds more than its share of them."""

    def arranged(leaf, split: Split | None):
        if split is None or split.parts == 1 or spec.model == 1:
            return leaf
        # [q | k | v] divided in two would give one device q and half of k: every section is
        # divided, and the shares of a device are put side by side
        array, shape, axis = np.asarray(leaf), leaf.shape, split.axis
        cut = array.reshape(*shape[:axis], split.parts, spec.model, -1, *shape[axis + 1 :])
        return np.swapaxes(cut, axis, axis + 1).reshape(shape)

    leaves, tree = jax.tree.flatten(networks)
    places = jax.tree.leaves(shardings)
    arrays = jax.tree.leaves(map_weights(arranged, networks))
    assert len(leaves) == len(places) == len(arrays)
    return tree.unflatten([jax.device_put(a, p) for a, p in zip(arrays, places, strict=True)])
