"""The processes of a program on several hosts, if `jax.distributed` has joined them; else there is
one, which exchanges nothing. A process that dies is noticed by the next exchange, when its
connection closes, or by the heartbeats of `jax.distributed`, which then end the process."""

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import jax
import numpy as np

Tree = TypeVar("Tree")
LOST = "another process is gone ({}): start the same command again, which goes on where it stopped"


class LostProcess(Exception):
    """Another process does not answer any more."""


def count() -> int:
    """Number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """The number of this process."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def where() -> str:
    """Whose devices `jax.devices()` are, for messages."""
    return "this machine" if count() == 1 else f"the whole of {count()} processes"


def is_first() -> bool:
    """Whether this process writes results and progress."""
    return index() == 0


def gathered(tree: Tree) -> Tree:
    """Return arrays of all processes as every one of them can read them: in host memory, one after
    the other. Arrays of one process stay where they are."""
    if count() == 1:
        return tree
    from jax.experimental import multihost_utils

    def whole(array: jax.Array) -> np.ndarray:
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.asarray(array)

    with answering():
        return jax.tree.map(whole, tree)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Programs inside run on the devices of all processes. `LostProcess` if one fails, unless it is
    for want of memory: the usual reason is that a connection was closed."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        ours = isinstance(error, ValueError) and "Gloo" not in reason  # whose errors may be so, too
        if count() == 1 or ours or "RESOURCE_EXHAUSTED" in reason:
            raise
        raise LostProcess(LOST.format(f"{reason:.150}")) from None
