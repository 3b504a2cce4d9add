"""Compiled programs kept on disk, so that a second process starts without compiling.

JAX keeps and finds them (`jax_compilation_cache_dir`). This module chooses the folder, for varjax's
commands and, where nobody has chosen one, for a `Generator`; and counts what came from there.
"""

import collections
import contextlib
import tempfile
from collections.abc import Iterator
from threading import get_ident

import jax
from jax.experimental.compilation_cache import compilation_cache

from varjax.storage.names import cache_folder

# Programs that compile faster than this are not kept: single operations, mostly.
SHORTEST_S = 0.5
# events of JAX: a program was looked for in the cache; it was there
_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"


def use() -> None:
    """Keeps compiled programs in the folder that JAX was told (JAX_COMPILATION_CACHE_DIR), else in
    `varjax/programs` of the user's cache folder. Where that cannot be written there is no cache."""
    # who set JAX's own variable has chosen, and may share the folder with other programs
    if jax.config.jax_compilation_cache_dir:
        return
    folder = cache_folder("programs")
    # asking for permissions is not enough: for root they always look right
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_S)
        compilation_cache.reset_cache()  # JAX looks at the folder once, when it first compiles


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keeps programs that are compiled inside in `varjax/programs` of the user's cache folder,
    unless JAX was told a folder or to keep nothing (JAX_ENABLE_COMPILATION_CACHE=false). Other
    programs of the process are not kept."""
    config = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        yield
        return
    shortest = config.jax_persistent_cache_min_compile_time_secs
    use()
    try:
        yield
    finally:
        config.update("jax_compilation_cache_dir", None)
        config.update("jax_persistent_cache_min_compile_time_secs", shortest)
        compilation_cache.reset_cache()


# of this process, by thread; there is no public way to stop listening
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([(event, get_ident())]))


def verdict(before: collections.Counter) -> str:
    """Origin of the programs that this thread has compiled since then: "warm" if every program came
    from the cache, "cold" if something was compiled, "off" if there is no cache. before: `events`,
    copied."""
    here = get_ident()
    requests, hits = (events[name, here] - before[name, here] for name in (_REQUEST, _HIT))
    # JAX counts requests without a folder, too
    if not requests or not jax.config.jax_compilation_cache_dir:
        return "off"
    return "warm" if hits == requests else "cold"
