"""Layers split over devices: what a model's step functions need to know of it.

Inside `over(axis)` every device of a mesh axis runs the step functions on its share of the heads
and of the feed-forward's width, and products that contract over a split width are summed over the
axis. Outside of it these functions do what their names say on one device.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from flax import nnx
from jaxtyping import Array, Float

_axis: contextvars.ContextVar[str | None] = contextvars.ContextVar("model_axis", default=None)


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
    return jax.lax.psum(x @ linear.kernel[...].astype(x.dtype), axis) + linear.bias[...]


def whole(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """All of an array whose last axis is split."""
    axis = _axis.get()
    return x if axis is None else jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
