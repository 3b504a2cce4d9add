"""Generation over several devices: one program, run by every device on its share.

`data` splits the images of a batch, and nothing is exchanged. `model` splits heads and the width of
the feed-forward: every device has a pool of its own for its heads, and two sums per layer are
exchanged. An image does not depend on how a batch is split.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from varjax.errors import UserError
from varjax.nn import quantized, schemes, stacked
from varjax.nn.quantized import Quantized
from varjax.nn.split import Split
from varjax.nn.stacked import Leaf, Turned
from varjax.parallel import processes
from varjax.parallel.split import AXES, MeshSpec

DATA, MODEL = AXES
Tree = TypeVar("Tree")  # anything that JAX takes for a tree of arrays


def make_mesh(spec: MeshSpec, devices: Sequence[jax.Device]) -> Mesh:
    """Return the first devices as a mesh with the axes data and model."""
    return Mesh(np.array(devices[: spec.num_devices]).reshape(spec.shape), AXES)


def map_weights(
    function: Callable[[Leaf, Split | None], object], networks: Mapping[str, nnx.Module]
) -> PyTree:
    """Call `function(array, Split or None)` for every array of the networks; return a tree of the
    results. None: the array is whole on every device."""
    splits = networks["transformer"].splits()
    splits = {f"transformer.blocks.{name}": split for name, split in splits.items()}

    def with_split(path: tuple, leaf: Leaf | Quantized | Turned) -> object:
        # the path down to the parameter; behind "value" it goes on into separate layers
        keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        end = keys.index("value") if "value" in keys else len(keys)
        split = splits.get(".".join(keys[:end]))
        if split and "parts" in keys[end:]:  # weights of one layer, without the axis of the layers
            split = dataclasses.replace(split, axis=split.axis - 1)
        if isinstance(leaf, Turned):  # a program on another mesh left it so
            turned = split and dataclasses.replace(split, axis=1 - split.axis)
            return Turned(function(leaf.array, turned))
        if not quantized.is_one(leaf):
            return function(leaf, split)
        if split is None:
            return jax.tree.map(lambda array: function(array, None), leaf)

        def along(array: Leaf, axis: int | None) -> object:
            return function(array, None if axis is None else dataclasses.replace(split, axis=axis))

        return leaf.by_axis(along, split.axis)

    def is_matrix(leaf: object) -> bool:
        return quantized.is_one(leaf) or isinstance(leaf, Turned)

    return jax.tree_util.tree_map_with_path(with_split, networks, is_leaf=is_matrix)


def check_widths(transformer: nnx.Module, parts: int) -> None:
    """Refuse matrices in 8 bits whose shares of `parts` devices a chip cannot multiply, and models
    of the user's own that do not say how they are divided.

    Raises:
      UserError: which matrix, and what to do.
    """
    splits, where = transformer.splits(), f" on each of model={parts} devices"
    if parts > 1 and not splits:
        raise UserError(
            f"{type(transformer).__name__} has no `splits`, so that its heads cannot be divided: "
            "use data alone"
        )
    for name, kernel in quantized.matrices(transformer).items():
        split = splits.get(name.removeprefix("blocks/").replace("/", "."))
        value = kernel.get_value()
        one = value[0] if stacked.is_one(value) else value
        if split and parts > 1 and quantized.is_one(one):
            widths = list(value.shape)  # with the axis of the layers
            widths[split.axis] //= parts
            schemes.check_widths(one.scheme, name, widths, where)


def bytes_per_device(networks: Mapping[str, nnx.Module], parts: int) -> int:
    """Bytes of the weights on one device, if `parts` devices share the divided ones."""

    def size(leaf: Leaf, split: Split | None) -> int:
        return math.prod(leaf.shape) * leaf.dtype.itemsize // (parts if split else 1)

    return sum(jax.tree.leaves(map_weights(size, networks)))


def check_weights(networks: Mapping[str, nnx.Module], spec: MeshSpec) -> None:
    """Raise `UserError` if a matrix cannot be divided evenly over `model`. Shapes are enough."""

    def check(leaf: Leaf, split: Split | None) -> None:
        if split is None:
            return
        # widths of the sections side by side are multiples of this
        unit = leaf.shape[split.axis] // sum(split.parts)
        if unit % spec.model:
            raise UserError(
                f"layers have a matrix {' x '.join(map(str, leaf.shape[-2:]))}, of which {unit} "
                f"cannot be split evenly over model={spec.model} devices: choose a divisor of "
                f"{unit}"
            )

    if spec.model > 1:
        map_weights(check, networks)


def _weight_specs(networks: Mapping[str, nnx.Module], parts: int) -> PyTree[P]:
    def spec_of(leaf: Leaf, split: Split | None) -> P:
        if split is None or parts == 1:
            return P()
        return P(*(MODEL if axis == split.axis else None for axis in range(leaf.ndim)))

    return map_weights(spec_of, networks)


class ProgramSpec(Protocol):
    """The static side of a program that draws codes (`varjax.engine.drawing`)."""

    keep_logits: bool
    few_rows: bool  # whether products have the rows of a single token

    def generate(
        self,
        networks: Mapping[str, nnx.Module],
        state: PyTree[Array],
        condition: PyTree,
        keys: Array,
        inputs: tuple,
        given: PyTree[Array],
    ) -> tuple[dict[str, Array], PyTree[Array]]:
        """Draw a batch. Return results by name, and the final cache."""
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
        cls,
        mesh: Mesh,
        spec: ProgramSpec,
        networks: Mapping[str, nnx.Module],
        state_specs: PyTree[P],
        input_specs: tuple,
        given: PyTree,
    ) -> "ShardedProgram":
        """Divide the weights over `model`, and every array with an axis of images over `data`.
        `given` and `networks` may be shapes."""
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


def place_weights(
    networks: dict[str, nnx.Module], spec: MeshSpec, shardings: PyTree[NamedSharding]
) -> dict[str, nnx.Module]:
    """Put the networks on the mesh, array by array. The sections of side-by-side parameters
    (queries, keys, values) are interleaved so that every device's share is contiguous. The host
    does that, so that no device ever holds more than its share."""

    def arranged(leaf: Leaf, split: Split | None) -> Leaf:
        if split is None or len(split.parts) == 1 or spec.model == 1:
            return leaf
        # [q | k | v] divided in two would give one device q and half of k: every section is
        # divided, and the shares of a device are put side by side
        array, axis = np.asarray(leaf), split.axis
        unit = array.shape[axis] // sum(split.parts)
        sections = np.split(array, unit * np.cumsum(split.parts)[:-1], axis)
        shares = [np.split(section, spec.model, axis) for section in sections]
        return np.concatenate([part for share in zip(*shares, strict=True) for part in share], axis)

    leaves, tree = jax.tree.flatten(networks)
    places = jax.tree.leaves(shardings)
    arrays = jax.tree.leaves(map_weights(arranged, networks))
    assert len(leaves) == len(places) == len(arrays)
    return tree.unflatten([_placed(a, p) for a, p in zip(arrays, places, strict=True)])


def place(arrays: Tree, shardings: PyTree[NamedSharding]) -> Tree:
    """Put arrays on a mesh. With several processes each of them has all of every array, and hands
    over its own devices' parts."""
    if processes.count() == 1:
        return jax.device_put(arrays, shardings)
    places = jax.tree.broadcast(shardings, arrays)
    return jax.tree.map(_placed, arrays, places)


def _placed(array: Leaf, where: NamedSharding) -> Leaf:
    if processes.count() == 1:
        return jax.device_put(array, where)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):  # which are not NumPy's
        kind = jax.random.key_impl(array)
        return jax.random.wrap_key_data(_placed(jax.random.key_data(array), where), impl=kind)
    held = np.asarray(array)
    return jax.make_array_from_callback(held.shape, where, lambda part: held[part])
