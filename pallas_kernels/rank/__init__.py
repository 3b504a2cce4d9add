"""Ranks of a head's tokens."""

from pallas_kernels.rank.api import rank
