"""Products of one token: signature, documentation and dispatch.

A layer that draws token by token has four products with weights. Here each does what comes before
and after it, too: the norm of the stream, the rotation of queries and keys, the gate, the residual
sum. See `operands` for `Stream` and `Angles`.

R rows (2 to 256), D width of the stream, C columns, F width of the feed-forward.
"""

from jaxtyping import Array, Float

from pallas_kernels import implementations
from pallas_kernels.token_products.operands import Angles, QuerySum, Stream

MODULES = implementations.modules_of(__package__, "mosaic")
# `mosaic` runs only where it is named: no chip has confirmed it yet
AUTOMATIC = {name: module for name, module in MODULES.items() if name != "mosaic"}


def start(
    x: Float[Array, "R D"],
    norm: Float[Array, " D"],
    eps: float,
    dtype,
    *,
    implementation: str | None = None,
) -> Stream:
    """The stream before the first product. eps, norm: of the norm that comes next. dtype: of the
    products. implementation: here and below one of `implementations.NAMES`; None takes the best one
    that a chip has confirmed."""
    return _run(implementation, "start", x, norm, eps, dtype)


def project(
    stream: Stream,
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
    return _run(implementation, "project", stream, weights, angles, total)


def gate(
    stream: Stream, weights: Float[Array, "D C"], *, implementation: str | None = None
) -> Float[Array, "R F"]:
    """silu(gates) * values of the normalised stream; the first half of the columns are gates."""
    return _run(implementation, "gate", stream, weights)


def add(
    stream: Stream,
    branch: Float[Array, "R C"],
    weights: Float[Array, "C D"],
    norm: Float[Array, " D"],
    *,
    implementation: str | None = None,
) -> Stream:
    """The stream with `branch @ weights` added. norm: weights of the norm that comes next."""
    return _run(implementation, "add", stream, branch, weights, norm)


def _run(implementation: str | None, function: str, *arguments):
    modules = AUTOMATIC if implementation is None else MODULES
    return implementations.run(implementation, modules, function, *arguments)
