"""Work split over devices: how many there are along each axis of a mesh, and what a model's step
functions need to know of it.

`data` splits the images of a batch; `model` splits heads and weights of every layer. Inside
`over(axis)` every device of a mesh axis runs the step functions on its share of the heads and of
the feed-forward's width, and products that contract over a split width are summed over the axis.
Outside of it these functions do what their names say on one device.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from flax import nnx
from jaxtyping import Array, Float

from varjax.arguments import integer
from varjax.errors import UserError, nearest
from varjax.key_values import parse_pairs

AXES = ("data", "model")
LARGEST_MESH = 10**7  # devices along an axis
_axis: contextvars.ContextVar[str | None] = contextvars.ContextVar("model_axis", default=None)


@dataclass(frozen=True)
class MeshSpec:
    """Devices along each axis, `data` first."""

    data: int = 1
    model: int = 1

    def __post_init__(self):
        for axis in AXES:
            object.__setattr__(self, axis, integer(axis, getattr(self, axis), 1, LARGEST_MESH))

    @classmethod
    def parse(cls, text: str | None) -> "MeshSpec":
        """Read "data=4,model=2"; axes that are left out have one device, as has no text.

        Raises:
          UserError: an unknown axis, one given twice, or no whole number from 1 on.
        """
        sizes = {}
        for axis, size in parse_pairs(text or "").items():
            if axis not in AXES:
                raise UserError(
                    f"unknown axis {axis!r} of a mesh: choose data (images) or model (heads and "
                    f"weights), for example data=4,model=2{nearest(axis, AXES)}"
                )
            # isdecimal alone also accepts digits of other scripts, and int() very long texts
            if not (size.isascii() and size.isdecimal() and len(size) < 8 and int(size) >= 1):
                raise UserError(f"{axis}={size:.60} is no number of devices, 1 or more")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.data, self.model)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def check(self, *, batch_size: int, num_heads: int, available: int, where: str) -> "MeshSpec":
        """Return self.

        Args:
          available: devices that there are. where: of what, for the message.

        Raises:
          UserError: more devices than there are, or a batch or heads that cannot be divided.
        """
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


# --- layers ---


@dataclass(frozen=True)
class Split:
    """How a parameter is divided: along `axis`, which consists of `parts` sections (3 for queries,
    keys and values side by side) that are each divided."""

    axis: int
    parts: int = 1


@contextlib.contextmanager
def over(axis: str | None) -> Iterator[None]:
    """While tracing inside: layers are split over this axis of the mesh (None: they are not)."""
    token = _axis.set(axis)
    try:
        yield
    finally:
        _axis.reset(token)


def contract(linear: nnx.Linear, x: Float[Array, "... D_in"]) -> Float[Array, "... D_out"]:
    """A linear layer whose input width is split; its bias is added once."""
    axis = _axis.get()
    if axis is None:
        return linear(x)
    # every device has a part of the contraction; the bias is whole on all of them: after the sum
    product = jax.lax.psum(x @ linear.kernel[...].astype(x.dtype), axis)
    return product if linear.bias is None else product + linear.bias[...]


def whole(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """All of an array whose last axis is split."""
    axis = _axis.get()
    return x if axis is None else jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
