"""Attention of one query per row and head over the slots of its head: a step of models that draw
token by token."""

from pallas_kernels.token_attention.api import attend, scores, store_and_attend
from pallas_kernels.token_attention.operands import HeadSlots, NewToken, Query
from pallas_kernels.token_attention.storing import store

__all__ = ["HeadSlots", "NewToken", "Query", "attend", "scores", "store", "store_and_attend"]
