"""Meshes of devices: their axes and sizes, and what is divided along them.

`data` splits the images of a batch; `model` splits heads and weights of every layer
(`varjax.core.layers.Split`).

Parameters, caches, batches and the state of a training say what an axis of theirs counts: images,
heads. They do so in a `PartitionSpec` of names, as in `P(IMAGES, None, HEADS)`; None is an axis
that is never divided. `RULES` is the only place that sends a name to axes of a mesh. A rule holds
on every mesh: axes that a mesh does not have are left out, so `IMAGES` is `data` where images are
drawn, and `data` and `fsdp` where a model is trained.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from varjax.core.arguments import integer
from varjax.core.errors import UserError, nearest
from varjax.core.layers import HEADS, HIDDEN, MODULATION
from varjax.storage.values import parse_pairs

DATA, MODEL, FSDP = MESH_AXES = ("data", "model", "fsdp")
DIVIDES = {DATA: "images", MODEL: "heads and weights"}  # by axis
AXES = tuple(DIVIDES)
LARGEST_MESH = 10**7  # devices along an axis
REST = "-1"  # as many as are left over

IMAGES = "images"  # of a batch, their labels, texts and keys; rows of a cache
LONGEST = "longest"  # the longest axis that can be divided, of any array that is trained

RULES: Mapping[str, tuple[str, ...]] = {
    IMAGES: (DATA, FSDP),
    HEADS: (MODEL,),
    HIDDEN: (MODEL,),
    MODULATION: (MODEL,),
    LONGEST: (FSDP,),
}


def axis_sizes(text: str | None, axes: Mapping[str, str], available: int | None) -> dict[str, int]:
    """Read "data=4,model=2" as {axis: devices}. axes: {axis: what it divides}. Raises the errors of
    `MeshSpec.parse`."""
    sizes: dict[str, int] = {}
    for axis, size in parse_pairs(text or "").items():
        if axis not in axes:
            known = " or ".join(f"{name} ({what})" for name, what in axes.items())
            example = ",".join(f"{name}={size}" for name, size in zip(axes, (4, 2), strict=True))
            raise UserError(
                f"unknown axis {axis!r} of a mesh: choose {known}, for example "
                f"{example}{nearest(axis, list(axes))}"
            )
        rest = size == REST and available
        if rest and int(REST) in sizes.values():
            raise UserError(f"{axis}={REST}: only one axis may be {REST}, what is left over")
        # isdecimal alone also accepts digits of other scripts, and int() very long texts
        digits = size.isascii() and size.isdecimal() and len(size) < 8
        if not rest and not (digits and int(size) >= 1):
            raise UserError(f"{axis}={size:.60} is no number of devices, 1 or more")
        sizes[axis] = int(size)
    left = (available or 1) // math.prod(size for size in sizes.values() if size > 0)
    return {axis: size if size > 0 else max(1, left) for axis, size in sizes.items()}


@dataclass(frozen=True)
class MeshSpec:
    """Devices along each axis, `data` first."""

    data: int = 1
    model: int = 1

    def __post_init__(self):
        for axis in AXES:
            object.__setattr__(self, axis, integer(axis, getattr(self, axis), 1, LARGEST_MESH))

    @classmethod
    def parse(cls, text: str | None, available: int | None = None) -> "MeshSpec":
        """Read "data=4,model=2". Axes that are left out have one device; without a text all have.

        available: devices that there are; one axis may then be -1, which takes what is left over.
        `UserError` for an unknown axis, one that is given twice, or no whole number from 1 on.
        """
        return cls(**axis_sizes(text, DIVIDES, available))

    @property
    def num_devices(self) -> int:
        return self.data * self.model

    def check(self, *, batch_size: int, num_heads: int, available: int, where: str) -> "MeshSpec":
        """Returns self. `UserError` for more devices than are `available` in `where`, and for a
        batch or heads that cannot be divided."""
        if self.num_devices > available:
            raise UserError(
                f"a mesh of {self} takes {self.num_devices} devices, {where} has at most "
                f"{available}: choose smaller axes"
            )
        if batch_size % self.data:
            raise UserError(
                f"{batch_size} images cannot be split evenly over data={self.data} devices: choose "
                f"a batch size that is a multiple of {self.data}"
            )
        if num_heads % self.model:
            raise UserError(
                f"{num_heads} heads cannot be split evenly over model={self.model} devices: choose "
                f"a divisor of {num_heads}"
            )
        return self

    def __str__(self) -> str:
        return f"data={self.data},model={self.model}"


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
