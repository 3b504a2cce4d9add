"""Between matrix products: signatures, documentation and dispatch."""

from jaxtyping import Array, Float

from pallas_kernels import implementations
from pallas_kernels.residual.operands import Activation, Bits8, Branch, Norm, Rows8, Sums

MODULES = implementations.modules_of(__package__, "mosaic")


def has_kernel(implementation: str | None) -> bool:
    """Whether a name stands for a kernel here (`implementations.run`)."""
    return implementations.first_choice(implementation, MODULES) != "reference"


def add_and_normalize(
    stream: Float[Array, "R T D"],
    branch: Branch | None,
    norm: Norm,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "R T D"] | Rows8, Float[Array, "R T D"]]:
    """Add a branch to the residual stream and normalise the sum.

    Args:
      branch: None: nothing is added.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform.
        There is one kernel, for Hopper and Blackwell; other kernels' names run the reference.

    Returns:
      The normalised and modulated tokens, in 8 bits where `norm.bits` says so, and the stream.
      Kernels compute in float32 and round each result once; the reference rounds after each step
      to the type of what it computes with.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    return implementations.run(implementation, MODULES, "add_and_normalize", stream, branch, norm)


def to_8_bits(
    sums: Sums,
    bits: Bits8,
    activation: Activation | None = None,
    *,
    implementation: str | None = None,
) -> Rows8:
    """Rows of a product in 8 bits, each with a scale.

    Args:
      sums: [R, T, D], with what has still to be done to them.
      activation: applied before.

    The rest is as in `add_and_normalize`.
    """
    return implementations.run(implementation, MODULES, "to_8_bits", sums, bits, activation)
