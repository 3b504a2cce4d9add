"""`store_and_attend` where storing is a kernel of its own, or XLA's."""

from collections.abc import Callable

from jaxtyping import Array

AttendAndStore = Callable[..., tuple[Array, Array, Array | None]]


def in_turn(attend: Callable, write: Callable) -> AttendAndStore:
    """`api.store_and_attend` of an implementation that has `attend` and `write`."""

    def run(projection, new_length, kv_pool, table, writes, kv_scale, **options):
        given = (projection, new_length, kv_pool, table, kv_scale)
        out = attend(*given, return_lse=False, **options)
        # Which of the two comes first does not matter, as they share no slot. This way round XLA
        # updates the pool in place on all platforms.
        return out, *write(kv_pool, projection, writes, kv_scale, after=out, **options)

    return run
