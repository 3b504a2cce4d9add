"""Names for types that signatures and fields of kernels share, and single numbers as operands."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

Ref = jax.Ref  # memory that a kernel reads or writes, whole or a view of it
Scalar = Array | int  # one number: traced, or known while tracing
# A field of a dataclass of operands: an array outside kernels, its part in a program where specs
# are made, a reference inside kernels; None where there is nothing.
Operand = Array | pl.BlockSpec | Ref | None


def one_number(value) -> Array:
    """A scalar as an operand, int32 [1]; None is 0. A reshape costs no kernel, even of a traced
    number."""
    return jnp.asarray(0 if value is None else value, jnp.int32).reshape(1)
