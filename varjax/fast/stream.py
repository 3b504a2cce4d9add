"""The residual stream of a layer whose sums and norms are one kernel.

XLA adds branches up where it likes, and starts kernels of their own for it. Here a branch waits
until the next norm adds it (`pallas_kernels.residual`).
"""

from dataclasses import dataclass, field, replace

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from pallas_kernels.projection import Projection
from pallas_kernels.residual import Branch, Norm, Rows8, Sums, Vectors
from pallas_kernels.residual.api import add_and_normalize, has_kernel, to_8_bits
from pallas_kernels.residual.operands import Bits8
from varjax.core import layers, stacked
from varjax.core.layers import Activation, Linear, ResidualStream
from varjax.fast import quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FusedStream(ResidualStream):
    """The stream, and what its products take.

    value: the stream without the branch.
    branch: still to be added; None: there is none.
    implementation: of the kernels, static.
    bits: static, how rows are brought into 8 bits for products; None: they are not.
    """

    branch: Branch | None = None
    implementation: str | None = field(default=None, metadata=dict(static=True))
    bits: Bits8 | None = field(default=None, metadata=dict(static=True))

    def vectors(
        self,
        of_layer: PyTree[Array],
        of_all: PyTree[Array],
        layer: Int[Array, ""],
    ) -> PyTree[Array]:
        # kernels read vectors where they lie; numbers of a layer are no vectors
        return jax.tree.map(lambda one, a: Vectors(a, layer) if one.ndim else one, of_layer, of_all)

    def normalized(
        self, vectors: Vectors, scale: int, shift: int, eps: float
    ) -> tuple[Float[Array, "R T D"] | Rows8, "FusedStream"]:
        norm = Norm(vectors, scale, shift, eps, self.dtype or self.value.dtype, self.bits)
        found, value = add_and_normalize(
            self.value, self.branch, norm, implementation=self.implementation
        )
        return found, replace(self, value=value, branch=None)

    def qkv(self, block: nnx.Module, h: Float[Array, "R T D"] | Rows8, head_dim: int) -> Projection:
        biases, sums = layers.qkv_biases(block, head_dim), self._sums(block.qkv, h)
        channels = sums.channel_scale
        return Projection(
            sums.array.reshape(*h.shape[:2], 3, -1, head_dim),
            *biases,
            row_scale=sums.row_scale,
            channel_scale=None if channels is None else channels.reshape(3, -1, head_dim),
        )

    def contracted(self, linear: Linear, x: Float[Array, "R T D_in"], axis: str | None) -> Sums:
        return self._contracted(linear, Sums(x), axis)

    def feed_forward(
        self,
        first: Linear,
        second: Linear,
        h: Float[Array, "R T D"] | Rows8,
        axis: str | None,
        activation: Activation,
    ) -> Sums:
        return self._contracted(second, self._sums(first, h), axis, activation)

    def added(self, product: Sums, vectors: Vectors, gate: int) -> "FusedStream":
        assert self.branch is None
        return replace(self, branch=Branch(product, vectors, gate))

    def settled(self) -> Float[Array, "R T D"]:
        return self.value if self.branch is None else self.branch.added_to(self.value)

    def _sums(self, linear: Linear, h: Float[Array, "R T D"] | Rows8) -> Sums:
        """The layer of normalised rows; of rows in 8 bits, scales and bias are still to come."""
        if self.bits is None:
            return Sums(linear(h))
        bias = None if linear.bias is None else linear.bias[...]
        return replace(linear.kernel.get_value().sums(h), bias=bias)

    def _contracted(
        self, linear: Linear, x: Sums, axis: str | None, activation: Activation | None = None
    ) -> Sums:
        if self.bits is None:
            return Sums(layers.contract(linear, x.finished(), axis, activation))
        rows = to_8_bits(x, self.bits, activation, implementation=self.implementation)
        return self._sums(linear, rows)


def stream_of(
    transformer: nnx.Module,
    x: Float[Array, "R T D"],
    implementation: str | None,
    dtype: np.dtype | None = None,
) -> ResidualStream:
    """The stream before the first layer: fused where there is a kernel that fits.

    transformer: a `varjax.core.transformer.Transformer`. implementation: of the kernels. dtype: of
    norms; None: that of `x`.
    """
    bits = quantized.scheme_of_rows(transformer)
    # Kernels do not scale a row alike on the devices that share it, and attention takes no int32
    # sums.
    fits = bits is None or (transformer.model_axis is None and bits.dtype != np.int8)
    # A scan's carry is the same in all layers: there no branch can wait for the next layer's norm.
    if fits and stacked.is_separate(transformer.blocks) and has_kernel(implementation):
        return FusedStream(x, dtype, implementation=implementation, bits=bits)
    return ResidualStream(x, dtype)
