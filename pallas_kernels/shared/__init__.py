"""Operands, products and projections that the kernels of one platform share."""
