"""Generation over several devices: one program, run by every device on its share.

`data` splits the images of a batch: nothing is exchanged. `model` splits heads and the width of the
feed-forward; every device has a pool of its own for its heads, and two sums per layer are
exchanged. An image does not depend on how a batch is split.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from varjax.engine import scales, tokens
from varjax.nn.split import Split
from varjax.parallel.plans import ShardedPlan, ShardedTokenPlan
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


def _weight_specs(networks: Any, spec: MeshSpec) -> Any:
    def spec_of(leaf, split: Split | None):
        if split is None or spec.model == 1:
            return P()
        return P(*(MODEL if axis == split.axis else None for axis in range(leaf.ndim)))

    return map_weights(spec_of, networks)


@dataclass(frozen=True, eq=False)
class ShardedProgram:
    """`generate_codes` of `engine.scales` or `engine.tokens` (`draw`) for a mesh.

    specs: how the arguments (networks, state, condition, keys, inputs, given) are divided.
    """

    mesh: Mesh
    spec: scales.ProgramSpec | tokens.TokenSpec
    draw: Callable
    specs: tuple

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        spec,
        layout: ShardedPlan | ShardedTokenPlan,
        networks,
        state,
        inputs,
        given,
    ) -> "ShardedProgram":
        """For arguments of these shapes; `inputs` as the drawing makes them."""
        by_token = isinstance(layout, ShardedTokenPlan)
        draw = tokens.generate_codes if by_token else scales.generate_codes
        states, inputs = layout.specs(state, inputs)
        given = None if given is None else type(given)(P(DATA), P())
        weights = _weight_specs(networks, layout.spec)
        return cls(mesh, spec, draw, (weights, states, P(DATA), P(DATA), inputs, given))

    def __call__(self, *arguments):
        state = self.specs[1]

        def run(networks, *local):
            if self.mesh.shape[MODEL] > 1:
                divided = networks["transformer"].over(MODEL)
                networks = {**networks, "transformer": divided}
            return self.draw(networks, *local, spec=self.spec)

        names = ("tokens", "code_map", *(("logits",) if self.spec.keep_logits else ()))
        results = {name: P(DATA) for name in names}
        return self._on_mesh(run, self.specs, (results, state))(*arguments)

    def _on_mesh(self, function, in_specs, out_specs):
        # unchecked: results of `model` are equal on all devices by the sums per layer
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, mesh=self.mesh, check_vma=False, **specs)

    def place_shapes(self, which: int | slice, arguments: Any) -> Any:
        """Shapes of some arguments (by their place in `specs`), placed on the mesh."""
        return jax.tree.map(
            lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
            *(arguments, jax.tree.broadcast(self.shardings[which], arguments)),
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
