"""What a device or its compiler reports of a program, with what to do about it."""

import contextlib
from collections.abc import Iterator

import jax

from varjax.errors import UserError

# of a chip's own, which a kernel has used up: no smaller batch helps
ON_CHIP = ("vmem", "smem", "shared memory", "tmem", "registers")


class OutOfMemory(UserError):
    """The device has less memory than the program takes, whatever was predicted."""


@contextlib.contextmanager
def explained(doing: str, attention: str) -> Iterator[None]:
    """Errors of the device while `doing` something, in words.

    attention: the implementation of the kernels that the program has.

    Raises:
      OutOfMemory: the memory of the device does not suffice.
      NotImplementedError: as it comes, a kernel that cannot take the shapes. Others are a mistake
        of ours or of a compiler: they say in a note how to do without kernels.
    """
    try:
        yield
    except (UserError, NotImplementedError):
        raise
    except Exception as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and is_out_of_memory(str(error)):
            raise OutOfMemory(
                f"the device ran out of memory {doing}: {_first_line(error)}: take a smaller "
                f"batch_size, decode_batch or budget, or kv_dtype='int8'"
            ) from error
        of_jax = type(error).__module__.partition(".")[0] in ("jax", "jaxlib")
        if of_jax and attention != "reference":
            error.add_note(
                f"{doing} failed with kernels ({attention}): if one of them is to blame, "
                f"attention='reference' (--attention=reference) does without"
            )
        raise


def is_out_of_memory(message: str) -> bool:
    """Whether XLA says that the memory of the device, and not a chip's own, does not suffice."""
    words = message.lower()
    return "resource_exhausted" in words and not any(place in words for place in ON_CHIP)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]
