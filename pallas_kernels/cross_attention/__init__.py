"""Attention of image tokens over the tokens of a text."""

from pallas_kernels.cross_attention.api import TextKeys, attend_text
from pallas_kernels.cross_attention.reference import attend_visible
