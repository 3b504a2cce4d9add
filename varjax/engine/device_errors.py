"""Errors of a device or its compiler, with what to do about them."""

import contextlib
from collections.abc import Iterator

import jax

from varjax.errors import UserError

# Memories on the chip. A kernel that has used one up says the same words as a full device, but no
# smaller batch helps.
ON_CHIP = ("vmem", "smem", "shared memory", "tmem", "registers")


class OutOfMemory(UserError):
    """The device has less memory than the program takes, whatever was predicted."""


@contextlib.contextmanager
def explained(doing: str, attention: str) -> Iterator[None]:
    """Explains errors of the device while `doing` something: `OutOfMemory` if its memory does not
    suffice. `NotImplementedError`, of a kernel that cannot take the shapes, is passed on as it is;
    any other one is a mistake of ours or of a compiler, and gets a note that says how to do without
    kernels. attention: the implementation of the kernels that the program has."""
    try:
        yield
    except (UserError, NotImplementedError):
        raise
    except Exception as error:
        # XLA has one status for all memories; only the words say which one is full
        words = str(error).lower()
        full = "resource_exhausted" in words and not any(place in words for place in ON_CHIP)
        if isinstance(error, jax.errors.JaxRuntimeError) and full:
            said = str(error).strip().partition("\n")[0][:300]
            raise OutOfMemory(
                f"the device ran out of memory {doing}: {said}: take a smaller "
                f"batch_size, decode_batch or budget, or kv_dtype='int8'"
            ) from error
        # By the name of its package: what compilers raise has no common base class.
        of_jax = type(error).__module__.partition(".")[0] in ("jax", "jaxlib")
        if of_jax and attention != "reference":
            error.add_note(
                f"{doing} failed with kernels ({attention}): if one of them is to blame, "
                f"attention='reference' (--attention=reference) does without"
            )
        raise
