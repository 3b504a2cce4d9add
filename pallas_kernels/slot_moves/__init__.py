"""What lies in a head's last slots moves into slots that others have left."""

from pallas_kernels.slot_moves.api import move

__all__ = ["move"]
