"""Attention of one query per row and head over the slots of its head: a step of models that draw
token by token."""

from pallas_kernels.token_attention.api import attend, scores, scores_on_the_way, store_and_attend
from pallas_kernels.token_attention.operands import HeadSlots, NewToken, Probe, Query, QuerySum
from pallas_kernels.token_attention.reference import store
