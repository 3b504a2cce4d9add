"""Moves of slots: signature, documentation and dispatch.

After a stage of a model that draws token by token, some tokens of the buffer stay, which is the
last slots of every head. They move into slots that other tokens have left.
"""

from collections.abc import Sequence
from typing import TypeVar

from jaxtyping import Array, Int

from pallas_kernels import implementations
from pallas_kernels.token_attention.operands import HeadSlots

MODULES = implementations.modules_of(__package__, "mosaic", "tpu")
Slots = TypeVar("Slots", bound=HeadSlots)  # the caller's class comes back


def has_kernel(implementation: str | None = None) -> bool:
    """Whether a name stands for a kernel here, which needs no copies of what moves."""
    return implementations.first_choice(implementation, MODULES) != "reference"


def move_all(
    layers: Sequence[Slots],
    target: Int[Array, "LR M P"],
    *,
    below: int | None = None,
    implementation: str | None = None,
) -> tuple[Slots, ...]:
    """Copy the last P slots of every head into the slots given, bit by bit.

    Layers of equal shapes share a call, because a GPU would start kernels for each of them. A pool
    is updated in place when its buffer is not needed any more (donated, or carried by a scan).

    Args:
      layers: keys and values of any kind, NaN included. The scales of an int8 pool move along;
        positions and masses are left to the caller.
      target: int32, where the P slots go, all at the same time: at least 0, and no number twice in
        a head. A slot whose target is C or more goes nowhere. Slots that nothing goes to stay as
        they are, the last ones too. Rows of the first layer come first, then those of the second.
      below: static; no target lies from here on in the array. So a kernel need not write these
        slots. None: targets may lie anywhere.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform.
        There is no kernel `triton`: this name runs the reference.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    return implementations.run(implementation, MODULES, "move_all", layers, target, below)
