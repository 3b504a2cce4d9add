"""Timings of all operations, and of what they compete with, on the device that is there; and checks
of their results there."""

from pallas_kernels.bench.api import (
    OPERATIONS,
    compressed,
    errors,
    holds_scores,
    prepare,
    ways,
)
from pallas_kernels.bench.scales import DENSE, candidate, fits
from pallas_kernels.bench.timing import Candidate, Operation, Work, measure, short
from pallas_kernels.chips import of_kind as chip

__all__ = [
    "DENSE",
    "OPERATIONS",
    "Candidate",
    "Operation",
    "Work",
    "candidate",
    "chip",
    "compressed",
    "errors",
    "fits",
    "holds_scores",
    "measure",
    "prepare",
    "short",
    "ways",
]
