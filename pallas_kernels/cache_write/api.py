"""Storing a scale's tokens in the pool: signature, documentation and dispatch."""

from jaxtyping import Array, Float, Num

from pallas_kernels import implementations
from pallas_kernels.projection import Projection
from pallas_kernels.tables import BlockWrites

MODULES = implementations.modules_of(__package__)


def write(
    kv_pool: Num[Array, "R blocks block_size KV"],
    projection: Projection,
    writes: BlockWrites,
    *,
    kv_scale: Float[Array, "R blocks two_block_size"] | None = None,
    after: Float[Array, "..."] | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """Put tokens of a scale into the slots that `writes` names.

    The pool is updated in place where its old contents are not needed any more (donated, or carried
    by a scan), because kernels alias it.

    Args:
      kv_pool, kv_scale: as in `ragged_attention.attend`. An int8 pool stores each key and value
        divided by its scale = largest magnitude / 127, rounded to nearest even.
      projection: keys and values of the scale; they are stored finished.
      writes: which token goes into which slot.
      after: an array that is computed from the pool's old contents. Compilers for GPU and CPU copy
        the pool unless the data itself says that this array comes first.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform.

    Returns:
      The pool and its scales (None unless int8).

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    return implementations.run(
        implementation, MODULES, "write", kv_pool, projection, writes, kv_scale, after=after
    )
