"""Flags that several commands define alike, one function each."""

from absl.flags import FlagHolder

from varjax import arguments
from varjax.cache.plan import KV_DTYPES
from varjax.cli.flags import CommandFlags
from varjax.model import DTYPES


def batch_size(
    flags: CommandFlags, default: int, help: str = "Images per program call."
) -> FlagHolder[int]:
    """For a command that takes the number as it is."""
    return flags.integer(
        "batch_size", default, help, lower_bound=1, upper_bound=arguments.LARGEST_BATCH
    )


def dtype(flags: CommandFlags, default: str | None, of: str) -> FlagHolder[str]:
    """default: None is float32 on CPU, else bfloat16. of: what has that type."""
    usual = "" if default else "; default: float32 on CPU, else bfloat16"
    return flags.enum("dtype", default, sorted(DTYPES), f"Type of {of}{usual}.")


def kv_dtype(flags: CommandFlags) -> FlagHolder[str]:
    return flags.enum(
        "kv_dtype",
        None,
        list(KV_DTYPES),
        "Type of stored keys and values; default: --dtype. A budget is a fraction of a full cache "
        "of this type. int8 has a scale per token. What --compare compares with has --dtype.",
    )
