"""When Python looks for reference cycles.

Tracing a program makes and drops millions of objects, few of them in cycles: with Python's usual
thresholds looking for these takes about a tenth of the time from a command to its first picture.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import sys
from collections.abc import Iterator

RARELY = (100_000, 50, 100)  # objects made since the last look, per generation (`gc`)


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Look for cycles rarely; afterwards as often as before."""
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@functools.cache
def never_at_exit() -> None:
    """Do not look for cycles when this process ends: its memory goes anyway, and looking through
    all that JAX holds takes up to 0.7 s."""
    atexit.register(gc.disable)
    atexit.register(gc.freeze)


def give_back() -> None:
    """Free what nobody can reach, and hand free pages back to the system, which glibc keeps. It
    takes about a tenth of a second: for threads that nobody waits for by the millisecond."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
