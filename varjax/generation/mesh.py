"""Sizes of a mesh: the devices along each axis.

`data` splits the images of a batch; `model` splits heads and weights of every layer
(`varjax.core.layers.Split`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from varjax.core.arguments import integer
from varjax.core.errors import UserError, nearest
from varjax.generation.logical_axes import DATA, MODEL
from varjax.storage.values import parse_pairs

DIVIDES = {DATA: "images", MODEL: "heads and weights"}  # by axis
AXES = tuple(DIVIDES)
LARGEST_MESH = 10**7  # devices along an axis
REST = "-1"  # as many as are left over


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
