"""Attention of one query per row over the slots of its heads: a step of models that draw token by
token."""

from pallas_kernels.token_attention.api import attend, scores, store_and_attend
from pallas_kernels.token_attention.storing import store

__all__ = ["attend", "scores", "store", "store_and_attend"]
