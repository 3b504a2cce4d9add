"""Layers whose weights are divided over devices: how, and the products that need to know it.

The generation engine may run a transformer's step functions on every device of a mesh axis, each
with its share of the heads and of the feed-forward's width. The transformer then has the name of
that axis (`Transformer.model_axis`) and passes it to the functions here. On one device the axis is
None, and the functions do what their names say.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from varjax.nn.layers import Linear
from varjax.nn.quantized import Activation


@dataclass(frozen=True)
class Split:
    """The division of a parameter.

    axis: the axis of the array that is divided.
    name: what the axis counts (`varjax.logical_axes`), which says over which devices.
    parts: relative widths of the sections that this axis consists of, each divided by itself: (2,
      1, 1) for two queries, a key and a value of every head side by side.
    """

    axis: int
    name: str
    parts: tuple[int, ...] = (1,)


def contract(
    linear: Linear,
    x: Float[Array, "... D_in"],
    axis: str | None,
    activation: Activation | None = None,
) -> Float[Array, "... D_out"]:
    """Applies a linear layer whose input width is divided over `axis` of the mesh; the bias is
    added once. activation: applied to `x` first."""
    if axis is None:
        return linear(x, activation)
    # Every device sums over its part of the width. The bias is whole on all of them, so it may only
    # be added after the sum over devices.
    product = jax.lax.psum(linear.product(x, axis=axis, activation=activation), axis)
    return product if linear.bias is None else product + linear.bias[...]


def whole(x: Float[Array, "... D"], axis: str | None) -> Float[Array, "... D"]:
    """Gathers an array whose last axis is divided over `axis` of the mesh."""
    return x if axis is None else jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


def own_part(array: Float[Array, "N ..."], size: int, axis: str | None) -> Float[Array, "M ..."]:
    """The `size` rows that belong to this device, of an array that is whole on all devices along
    `axis` of the mesh."""
    if axis is None:
        return array
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axis) * size, size)
