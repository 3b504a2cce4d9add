"""The residual stream of a layer whose sums and norms are one kernel.

XLA adds branches up where it likes, and starts kernels of their own for it. Here a branch waits
until the next norm adds it (`pallas_kernels.residual`).
"""

from dataclasses import dataclass, field, replace

import jax
from jaxtyping import Array, Float

from pallas_kernels import implementations
from pallas_kernels.residual import (
    Branch,
    Norm,
    Rows8,
    Sums,
    Vectors,
    add_and_normalize,
    to_8_bits,
)
from pallas_kernels.residual.api import MODULES
from pallas_kernels.residual.operands import Activation, Bits8
from varjax.nn import layers
from varjax.nn.layers import Linear


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stream:
    """The stream, and what its products take.

    value: the stream without the branch.
    branch: still to be added; None: there is none.
    implementation: of the kernels, static.
    bits: static, how rows are brought into 8 bits for products; None: they are not.
    """

    value: Float[Array, "R T D"]
    branch: Branch | None = None
    implementation: str | None = field(default=None, metadata=dict(static=True))
    bits: Bits8 | None = field(default=None, metadata=dict(static=True))

    def added(self, product: Sums, gates: Vectors, place: int) -> "Stream":
        """The stream with a product, multiplied by a vector of `gates`. No branch may wait."""
        assert self.branch is None
        return replace(self, branch=Branch(product, gates, place))

    def normalized(
        self, vectors: Vectors, scale: int, shift: int, eps: float
    ) -> tuple[Float[Array, "R T D"] | Rows8, "Stream"]:
        """The normalised and modulated stream, which `Linear.sums` takes, and the stream with its
        branch added. scale, shift: places in `vectors`."""
        norm = Norm(vectors, scale, shift, eps, self.value.dtype, self.bits)
        found, value = add_and_normalize(
            self.value, self.branch, norm, implementation=self.implementation
        )
        return found, replace(self, value=value, branch=None)

    def contracted(
        self, linear: Linear, x: Sums, axis: str | None, activation: Activation | None = None
    ) -> Sums:
        """A linear layer of other rows. axis: of the mesh, see `layers.contract`; None where the
        stream has `bits`. activation: applied to `x` first."""
        if self.bits is None:
            return Sums(layers.contract(linear, x.finished(), axis, activation))
        rows = to_8_bits(x, self.bits, activation, implementation=self.implementation)
        return linear.sums(rows)

    def settled(self) -> Float[Array, "R T D"]:
        """The stream as an array, all added up."""
        return self.value if self.branch is None else self.branch.added_to(self.value)


def has_kernel(implementation: str | None) -> bool:
    """Whether sums and norms are a kernel. implementation: see `implementations.run`."""
    return implementations.first_choice(implementation, MODULES) != "reference"
