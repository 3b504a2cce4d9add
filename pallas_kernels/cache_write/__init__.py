"""Storing tokens in a pool of cache blocks, in place."""

from pallas_kernels.cache_write.api import write
from pallas_kernels.tables import BlockWrites, block_writes
