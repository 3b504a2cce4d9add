"""Names for types that signatures and fields of kernels share."""

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array

Ref = jax.Ref  # memory that a kernel reads or writes, whole or a view of it
Scalar = Array | int  # one number: traced, or known while tracing
# A field of a dataclass of operands: an array outside kernels, its part in a program where specs
# are made, a reference inside kernels; None where there is nothing.
Operand = Array | pl.BlockSpec | Ref | None
