"""Names of what the axes of arrays count, and the rules by which devices share them.

Parameters, caches, batches and the state of a training say what an axis counts: images, heads. They
do so in a `PartitionSpec` of names, as in `P(IMAGES, None, HEADS)`; None is an axis that is never
divided. `RULES` is the only place that sends a name to axes of a mesh. A rule holds on every mesh:
axes that a mesh does not have are left out, so `IMAGES` is `data` where images are drawn, and
`data` and `fsdp` where a model is trained.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from varjax.core.layers import HEADS, HIDDEN, MODULATION

DATA, MODEL, FSDP = MESH_AXES = ("data", "model", "fsdp")

IMAGES = "images"  # of a batch, their labels, texts and keys; rows of a cache
LONGEST = "longest"  # the longest axis that can be divided, of any array that is trained

RULES: Mapping[str, tuple[str, ...]] = {
    IMAGES: (DATA, FSDP),
    HEADS: (MODEL,),
    HIDDEN: (MODEL,),
    MODULATION: (MODEL,),
    LONGEST: (FSDP,),
}
Tree = TypeVar("Tree")


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The first of some devices as a mesh.

    sizes: devices along each axis of `MESH_AXES`, in order. The compiler may divide along all of
      them (`AxisType.Auto`); programs that divide by themselves are `jax.shard_map`s.
    """
    shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(shape, tuple(sizes), axis_types=types, devices=devices)


def mesh_spec(names: P, axes: Collection[str]) -> P:
    """Sends an array's names to axes of a mesh that has these `axes`."""
    found = (None if n is None else tuple(a for a in RULES[n] if a in axes) for n in names)
    return P(*(a if a is None or len(a) > 1 else next(iter(a), None) for a in found))


def shardings(names: PyTree[P], mesh: Mesh) -> PyTree[NamedSharding]:
    """The place of every array of a tree on a mesh, by its names."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, mesh_spec(spec, mesh.axis_names)), names)


def by_longest(shape: Sequence[int], parts: int) -> P:
    """Names of an array of this shape whose longest axis that `parts` divides is divided; it is
    whole on all devices if there is none, or one part."""
    fitting = [n for n in shape if n >= parts and n % parts == 0]
    if parts == 1 or not fitting:
        return P()
    axis = list(shape).index(max(fitting))
    return P(*(LONGEST if i == axis else None for i in range(len(shape))))
