"""Memory that is given back to the system.

A program that nobody holds any more stays where it is: a generator and what watches it name each
other, and Python looks for such cycles rarely (`varjax.garbage`). What the compiler took then lies
free in the C library's heap, which keeps it; glibc hands it back when asked to. JAX keeps traces.
"""

import ctypes
import gc
import sys

import jax


def give_back() -> None:
    """Free what nobody can reach, and hand free pages back to the system. It takes about a tenth
    of a second: for threads that nobody waits for by the millisecond."""
    gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries than glibc have none
    if trim is not None:
        trim(0)


def forget_traces() -> None:
    """Make JAX forget what it has traced and compiled. It keeps the traces of thousands of programs
    that nobody can call any more, a few MB each. What a `Generator` holds stays; helpers that JAX
    compiles at their first call are compiled again: call them once, before somebody waits."""
    jax.clear_caches()
    give_back()
