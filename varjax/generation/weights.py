"""Weights over several devices: how they are divided, whether they can be, and their way there.

A device is given its share and nothing else. Of weights that are on disk (`Stored`) the host holds
one array at most beside what its devices hold.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from varjax.core import stacked
from varjax.core.errors import UserError
from varjax.core.layers import Matrix, Split, is_matrix
from varjax.fast import quantized, schemes, stored
from varjax.fast.stored import WHOLE, Leaf, Ranges
from varjax.generation.mesh import MeshSpec


def map_weights(
    function: Callable[[Leaf, Split | None], object], networks: Mapping[str, nnx.Module]
) -> PyTree:
    """Call `function(array, Split or None)` for every array of the networks; return a tree of the
    results. None: the array is whole on every device."""
    splits = networks["transformer"].splits()
    splits = {f"transformer.blocks.{name}": split for name, split in splits.items()}

    def with_split(path: tuple, leaf: Leaf | Matrix) -> object:
        # the path down to the parameter; behind "value" it goes on into separate layers
        keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        end = keys.index("value") if "value" in keys else len(keys)
        split = splits.get(".".join(keys[:end]))
        if split and "parts" in keys[end:]:  # weights of one layer, without the axis of the layers
            split = replace(split, axis=split.axis - 1)
        if not is_matrix(leaf):
            return function(leaf, split)
        at = partial(replace, split)
        axis = None if split is None else split.axis
        return leaf.by_axis(lambda a, n: function(a, None if n is None else at(axis=n)), axis)

    return jax.tree_util.tree_map_with_path(with_split, networks, is_leaf=is_matrix)


def bytes_per_device(networks: Mapping[str, nnx.Module], parts: int) -> int:
    """Bytes of the weights on one device, if `parts` devices share the divided ones."""
    sizes = map_weights(
        lambda a, split: math.prod(a.shape) * a.dtype.itemsize // (parts if split else 1), networks
    )
    return sum(jax.tree.leaves(sizes))


def check_weights(networks: Mapping[str, nnx.Module], spec: MeshSpec) -> None:
    """Raises `UserError` if a matrix cannot be divided evenly over `model`, if a chip cannot
    multiply the shares of one in 8 bits, and for models of the user's own that do not say how they
    are divided. Shapes are enough."""
    parts, transformer = spec.model, networks["transformer"]
    if parts == 1:
        return
    splits = transformer.splits()
    if not splits:
        raise UserError(
            f"{type(transformer).__name__} has no `splits`, so that its heads cannot be divided: "
            "use data alone"
        )

    def check(leaf: Leaf, split: Split | None) -> None:
        if split is None:
            return
        # widths of the sections side by side are multiples of this
        unit = leaf.shape[split.axis] // sum(split.parts)
        if unit % parts:
            raise UserError(
                f"layers have a matrix {' x '.join(map(str, leaf.shape[-2:]))}, of which {unit} "
                f"cannot be split evenly over model={parts} devices: choose a divisor of {unit}"
            )

    map_weights(check, networks)
    for name, kernel in quantized.matrices(transformer).items():
        split = splits.get(name.removeprefix("blocks/").replace("/", "."))
        value = kernel.get_value()
        one = value[0] if stacked.is_one(value) else value
        if split and quantized.is_one(one):
            widths = list(value.shape)  # with the axis of the layers
            widths[split.axis] //= parts
            schemes.check_widths(one.scheme, name, widths, f" on each of model={parts} devices")


def names(networks: Mapping[str, nnx.Module]) -> PyTree[P]:
    """Logical names of the axes of every array (`varjax.generation.mesh`)."""

    def of(leaf: Leaf, split: Split | None) -> P:
        if split is None:
            return P()
        return P(*(split.name if axis == split.axis else None for axis in range(leaf.ndim)))

    return map_weights(of, networks)


# --- their way there ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Placing:
    """An array, how it is divided, and where it goes."""

    leaf: Leaf
    split: Split | None
    where: NamedSharding | None = None

    def shares(self) -> dict[Ranges, list[jax.Device]]:
        """{what of the divided axis: devices of this process that hold it}; (): all."""
        places, found = self.where.addressable_devices_indices_map(self.leaf.shape), {}
        for device, index in places.items():
            bounds, ranges = index[self.split.axis] if self.split else slice(None), []
            if bounds != slice(None):
                # [q | k | v] divided in two would give one device q and half of k: every section
                # is divided, and the shares of a device are put side by side
                width, start = self.leaf.shape[self.split.axis], 0
                parts = width // (bounds.stop - bounds.start)
                number = bounds.start * parts // width
                for section in self.split.parts:
                    section *= width // sum(self.split.parts)
                    first = start + number * (section // parts)
                    ranges.append((first, first + section // parts))
                    start += section
            found.setdefault(tuple(ranges), []).append(device)
        return found


def place(
    networks: dict[str, nnx.Module], shardings: PyTree[NamedSharding]
) -> dict[str, nnx.Module]:
    """Put the networks on a mesh, parameter by parameter. The sections of side-by-side parameters
    (queries, keys, values) are interleaved so that every device's share is contiguous. The host
    does that, so that no device ever holds more than its share. `UserError` if files of weights
    that are on disk are damaged."""
    tree, places = jax.tree.structure(networks), iter(jax.tree.leaves(shardings))
    found = [
        replace(placing, where=next(places))
        for placing in jax.tree.leaves(map_weights(_Placing, networks))
    ]
    together = defaultdict(list)  # layers of one stored array
    for placing in found:
        leaf = placing.leaf
        together[id(leaf.origin if isinstance(leaf, stored.Stored) else leaf)].append(placing)
    arrays = {}
    for group in together.values():
        arrays |= zip(map(id, group), _placed(group), strict=True)
    return tree.unflatten(arrays[id(placing)] for placing in found)


def _placed(group: list[_Placing]) -> list[jax.Array]:
    """Arrays on their devices: all layers of a share before the next share is read."""
    arrays = [[] for _ in group]
    for ranges, devices in group[0].shares().items():
        for placing, held in zip(group, arrays, strict=True):
            axis = placing.split.axis if ranges else WHOLE
            part = stored.part_of(placing.leaf, axis, ranges)
            held += [jax.device_put(part, device) for device in devices]
            jax.block_until_ready(held[-len(devices) :])  # only then the host's copy is free
            del part
    if isinstance(group[0].leaf, stored.Stored):
        group[0].leaf.forget()
    return [
        jax.make_array_from_single_device_arrays(p.leaf.shape, p.where, held)
        for p, held in zip(group, arrays, strict=True)
    ]
