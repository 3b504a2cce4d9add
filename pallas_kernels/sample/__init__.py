"""Choosing tokens from logits."""

from pallas_kernels.sample.api import sample
