"""Products with weights for one token of every row, with norm, gate and residual sum. See `api`."""

from pallas_kernels.token_products.api import add, gate, has_kernel, project, start, why_not
from pallas_kernels.token_products.operands import Angles, RMSNorm, TokenStream
