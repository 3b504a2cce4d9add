"""Products of one token: signature, documentation and dispatch.

A layer that draws token by token has four products with weights. Here each does what comes before
and after it, too: the norm of the stream, the rotation of queries and keys, the gate, the residual
sum. See `operands` for `TokenStream` and `Angles`.

R rows (2 to 256), D width of the stream, C columns, F width of the feed-forward.
"""

from jaxtyping import Array, Float

from pallas_kernels import implementations
from pallas_kernels.token_attention.operands import QuerySum
from pallas_kernels.token_products.operands import Angles, RMSNorm, TokenStream

MODULES = implementations.modules_of(__package__, "mosaic")


def has_kernel(implementation: str | None) -> bool:
    """Whether a name stands for a kernel here. Without one a layer is better left to XLA as it
    is."""
    return implementations.first_choice(implementation, MODULES) != "reference"


def why_not(implementation: str, dtype, hidden: int, angles: Angles) -> str | None:
    """Why the kernel named cannot take a layer, or None.

    Args:
      dtype: of the weights.
      hidden: width of the feed-forward.
      angles: say what heads there are; the width of the stream is that of the queries.
    """
    name = implementations.first_choice(implementation, MODULES)
    module = MODULES[name.removesuffix(implementations.SUFFIX)]()
    widths = {"width": angles.queries, "keys": angles.keys, "gates": hidden}
    try:
        module.check(dtype, widths, name.endswith(implementations.SUFFIX), angles)
    except NotImplementedError as error:
        return str(error)
    return None


def start(
    x: Float[Array, "R D"], norm: RMSNorm, eps: float, dtype, *, implementation: str | None = None
) -> TokenStream:
    """The stream before the first product. eps, norm: of the norm that comes next. dtype: of the
    products. implementation: here and below one of `implementations.NAMES`; None takes the best one
    for this platform."""
    return implementations.run(implementation, MODULES, "start", x, norm, eps, dtype)


def project(
    stream: TokenStream,
    weights: Float[Array, "D C"],
    angles: Angles,
    total: QuerySum | None = None,
    *,
    implementation: str | None = None,
) -> tuple[tuple[Array, Array, Array], Array | None]:
    """Finished queries, keys and values of the normalised stream, [R, queries], [R, keys] and
    [R, keys], and the running sum with these queries.

    Raises:
      NotImplementedError: here and below, the implementation named cannot run, with the reason.
    """
    return implementations.run(implementation, MODULES, "project", stream, weights, angles, total)


def gate(
    stream: TokenStream, weights: Float[Array, "D C"], *, implementation: str | None = None
) -> Float[Array, "R F"]:
    """silu(gates) * values of the normalised stream; the first half of the columns are gates."""
    return implementations.run(implementation, MODULES, "gate", stream, weights)


def add(
    stream: TokenStream,
    branch: Float[Array, "R C"],
    weights: Float[Array, "C D"],
    norm: RMSNorm,
    *,
    implementation: str | None = None,
) -> TokenStream:
    """The stream with `branch @ weights` added. norm: the one that comes next."""
    return implementations.run(implementation, MODULES, "add", stream, branch, weights, norm)
