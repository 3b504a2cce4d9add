"""The residual stream of a transformer: sums, norms and activations between matrix products."""

from pallas_kernels.residual.api import add_and_normalize, to_8_bits
from pallas_kernels.residual.operands import Branch, Norm, Rows8, Sums, Vectors
