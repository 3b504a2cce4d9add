"""Small parts of transformer decoders: normalisation, dense projection, head split, attention
with a dense mask; and weights that are divided over devices, with the products that need to know.

The generation engine may run a transformer's step functions on every device of a mesh axis, each
with its share of the heads and of the feed-forward's width. The transformer then has the name of
that axis (`Transformer.model_axis`) and passes it to `contract`. On one device the axis is None.

Letters: R rows, T tokens, N heads, H head size, D width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from pallas_kernels.projection import Projection, layer_norm, modulate

__all__ = ["layer_norm", "modulate"]  # besides what is defined here

# What axes of parameters count that devices may share (`Split`); `varjax.generation.mesh`
# says which.
HEADS = "heads"  # of attention: widths of layers, blocks of a pool, tables of a cache
HIDDEN = "hidden"  # the width of the feed-forward
MODULATION = "modulation"  # gates, scales and shifts of all layers, once per image

MAX_LOG_SCALE = math.log(100.0)  # of the learned attention multiplier
Activation = Callable[[Array], Array]  # a function of every number


class Matrix:
    """Base of what the kernel of a linear layer may be in place of an array: a matrix [D_in, D_out]
    that is held in another form, or the matrices of all layers. It has `shape` and `dtype` of the
    matrix that it stands for, and `product` and `of_all_layers` as `Linear` has them.

    `by_axis(function, axis)` calls `function(array, its axis)` for every array that it consists of,
    where `axis` is one of the matrix, and returns a tree of the results; None: the array does not
    have the axis. `shapes(dtype)` is the same without numbers, for products in `dtype`.
    """


def is_matrix(leaf: object) -> bool:
    """Whether a kernel is held in another form than an array."""
    return isinstance(leaf, Matrix)


class Linear(nnx.Linear):
    """A linear layer whose kernel may be a `Matrix`."""

    def __call__(
        self, x: Float[Array, "... D_in"] | PyTree[Array], activation: Activation | None = None
    ) -> Float[Array, "... D_out"]:
        """x: or rows in a form that the `Matrix` takes. activation: applied to `x` first."""
        if not is_matrix(self.kernel.get_value()):
            return super().__call__(activation(x) if activation else x)
        product = self.product(x, activation=activation)
        return product if self.bias is None else product + self.bias[...]

    def product(
        self,
        x: Float[Array, "... D_in"] | PyTree[Array],
        dtype=None,
        axis: str | None = None,
        activation: Activation | None = None,
    ) -> Float[Array, "... D_out"]:
        """`x @ matrix`, without the bias, in the type of `x`.

        dtype: of the result, if another.
        axis: of the mesh, over whose devices the input width is divided.
        activation: applied to `x` first.
        """
        kernel = self.kernel.get_value()
        if is_matrix(kernel):
            return kernel.product(x, dtype, axis, activation)
        x = activation(x) if activation else x
        return jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=dtype)

    def of_all_layers(self, x: Float[Array, "... D_in"]) -> Float[Array, "L ... D_out"]:
        """Products of the stacked matrices of all layers with the same rows, without biases."""
        kernel = self.kernel.get_value()
        if is_matrix(kernel):
            return kernel.of_all_layers(x)
        # a product per layer: one over all would first copy all these weights, transposed
        rows = jnp.broadcast_to(x, (len(kernel), *x.shape))
        return jnp.einsum("l...d,lde->l...e", rows, kernel)


@dataclass(frozen=True)
class Split:
    """The division of a parameter.

    axis: the axis of the array that is divided.
    name: what the axis counts (`varjax.generation.mesh`), which says over which devices.
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


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float, dtype
) -> Float[Array, "... D"]:
    """Root mean square normalisation with a learned scale. Everything is computed in float32; the
    result has type `dtype`."""
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (normal * scale.astype(jnp.float32)).astype(dtype)


def split_heads(x: Float[Array, "R T D"], head_dim: int) -> Float[Array, "R N T H"]:
    rows, length, _ = x.shape
    return x.reshape(rows, length, -1, head_dim).transpose(0, 2, 1, 3)


def merge_heads(x: Float[Array, "R N T H"]) -> Float[Array, "R T D"]:
    rows, heads, length, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows, length, heads * size)


def fused_qkv(block: nnx.Module, h: Float[Array, "R T D"], head_dim: int) -> Projection:
    """Queries, keys and values as one product `block.qkv`, with biases `block.q_bias` and
    `block.v_bias`; keys have no bias. The other fields of the projection are not set yet."""
    biases = qkv_biases(block, head_dim)
    return Projection(block.qkv(h).reshape(*h.shape[:2], 3, -1, head_dim), *biases)


def qkv_biases(block: nnx.Module, head_dim: int) -> tuple[Float[Array, "N H"], ...]:
    """Biases of queries and of values, head by head."""
    return tuple(b[...].reshape(-1, head_dim) for b in (block.q_bias, block.v_bias))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualStream:
    """The residual stream of layers with modulated norms, and the operations between their
    products, in plain JAX: what branches give is added at once. What is faster is a subclass
    (`varjax.fast.stream.FusedStream`); norms, sums and products then have forms of its own.

    `vectors` are what the condition of each row gives to a layer: gates, scales, shifts. dtype:
    static, of the normalised stream; None: that of `value`.
    """

    value: Float[Array, "R T D"]
    dtype: np.dtype | None = field(default=None, metadata=dict(static=True))

    def vectors(
        self, of_layer: PyTree[Array], of_all: PyTree[Array], layer: Int[Array, ""]
    ) -> PyTree[Array]:
        """The vectors of a layer, in the form that the operations take."""
        return of_layer

    def normalized(
        self, vectors: PyTree[Array], scale: int, shift: int, eps: float
    ) -> tuple[PyTree[Array], Self]:
        """The modulated norm, and the stream to go on with. scale, shift: places in `vectors`."""
        normal = modulate(layer_norm(self.value, eps), vectors[:, scale], vectors[:, shift])
        return normal.astype(self.dtype or self.value.dtype), self

    def qkv(self, block: nnx.Module, h: PyTree[Array], head_dim: int) -> Projection:
        """`fused_qkv` of the normalised stream."""
        return fused_qkv(block, h, head_dim)

    def contracted(
        self, linear: Linear, x: Float[Array, "R T D_in"], axis: str | None
    ) -> PyTree[Array]:
        """`contract`, for `added`."""
        return contract(linear, x, axis)

    def feed_forward(
        self,
        first: Linear,
        second: Linear,
        h: PyTree[Array],
        axis: str | None,
        activation: Activation,
    ) -> PyTree[Array]:
        """Two linear layers of the normalised stream, for `added`. axis: of the mesh, over whose
        devices the width between them is divided."""
        return contract(second, first(h), axis, activation)

    def added(self, product: PyTree[Array], vectors: PyTree[Array], gate: int) -> Self:
        """The stream with a product, multiplied by the vector in place `gate`."""
        return replace(self, value=self.value + product * vectors[:, None, gate])

    def settled(self) -> Float[Array, "R T D"]:
        """The stream as an array, all added up."""
        return self.value


def attention_multiplier(log_scale: Float[Array, "*layers N"]) -> Float[Array, "*layers N"]:
    """The learned multiplier of normalised queries, float32, at most 100."""
    clamped = jnp.minimum(log_scale.astype(jnp.float32), MAX_LOG_SCALE)
    return jnp.exp(clamped)


def dense_attention(
    q: Float[Array, "R GN T H"],
    k: Float[Array, "R N K H"],
    v: Float[Array, "R N K H_v"],
    mask: Bool[Array, "*#of_heads T K"] | None = None,
) -> Float[Array, "R T GN H_v"]:
    """Softmax attention with an explicit mask, which heads and rows may share, or without one; `q`
    is already scaled. Query head i reads the keys and values of head i // G. It serves teacher
    forcing, and the condition of models that draw token by token."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (jnp.repeat(a, group, axis=1) for a in (k, v))
    scores = jnp.einsum("rnth,rnkh->rntk", q, k, preferred_element_type=jnp.float32)
    scores = scores if mask is None else jnp.where(mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("rntk,rnkh->rnth", weights.astype(v.dtype), v).transpose(0, 2, 1, 3)
