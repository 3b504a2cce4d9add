"""Products with weights for one token of every row, with norm, gate and residual sum. See `api`."""

from pallas_kernels.token_products.api import add, gate, project, start
from pallas_kernels.token_products.operands import PIECE, Angles, QuerySum, Stream

__all__ = ["PIECE", "Angles", "QuerySum", "Stream", "add", "gate", "project", "start"]
