"""Memory that is given back to the system.

A program that nobody holds any more stays where it is: a generator and what watches it name each
other, and Python looks for such cycles rarely (`varjax.garbage`). What the compiler took then lies
free in the C library's heap, which keeps it; glibc hands it back when asked to.
"""

import ctypes
import gc
import sys


def give_back() -> None:
    """Free what nobody can reach, and hand free pages back to the system. It takes about a tenth
    of a second: for threads that nobody waits for by the millisecond."""
    gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries than glibc have none
    if trim is not None:
        trim(0)
