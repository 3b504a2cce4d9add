"""Moves of slots: signature, documentation and dispatch.

After a stage of a model that draws token by token, some tokens of the buffer stay, which is the
last slots of every head. They move into slots that other tokens have left.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from pallas_kernels import implementations
from pallas_kernels.token_attention.operands import HeadSlots

MODULES = implementations.modules_of(__package__, "tpu")
Slots = TypeVar("Slots", bound=HeadSlots)  # the caller's class comes back


def move(
    slots: Slots,
    target: Int[Array, "R M P"],
    *,
    last: Num[Array, "R M P KV"] | None = None,
    below: int | None = None,
    implementation: str | None = None,
) -> Slots:
    """Copy the last P slots of every head into the slots given, bit by bit.

    The pool is updated in place when its buffer is not needed any more (donated, or carried by a
    scan).

    Args:
      slots: keys and values of any kind, NaN included. The scales of an int8 pool move along;
        positions and masses are left to the caller.
      target: int32, where the P slots go, all at the same time: at least 0, and no number twice in
        a head. A slot whose target is C or more goes nowhere. Slots that nothing goes to stay as
        they are, the last ones too.
      last: what `last_slots` found for this layer; None: nothing was copied beforehand.
      below: static; no target lies from here on in the array. So a kernel need not write these
        slots. None: targets may lie anywhere.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform. On
        GPUs only the reference exists; the names of their kernels run it.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    return implementations.run(implementation, MODULES, "move", slots, target, last, below)


def last_slots(
    layers: Sequence[HeadSlots], count: int, *, implementation: str | None = None
) -> Sequence[Num[Array, "R M P KV"] | None]:
    """The last `count` slots of several layers, for `move`. They are copied at once, because a GPU
    would start a kernel for each layer. None for all of them where `move` needs no copies, or for
    one layer."""
    if len(layers) == 1 or implementations.first_choice(implementation, MODULES) != "reference":
        return [None] * len(layers)
    # XLA would move the copies into what takes them, see `reference`
    found = jnp.concatenate([slots.pool[:, :, -count:] for slots in layers])
    return jnp.split(jax.lax.optimization_barrier(found), len(layers))
