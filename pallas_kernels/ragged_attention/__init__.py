"""Attention of one scale's queries over a pool of cache blocks; every head has blocks of its
own."""

from pallas_kernels.ragged_attention.api import (
    QuerySums,
    attend,
    attention_moments,
    store_and_attend,
)
from pallas_kernels.ragged_attention.reference import attention_scores
from pallas_kernels.tables import BlockTable
