"""Moves of tokens from a head's last slots into slots that other tokens have left."""

from pallas_kernels.slot_moves.api import has_kernel, move_all
