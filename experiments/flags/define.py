"""Flags that several commands define alike, one function each."""

from absl.flags import FlagHolder

from pallas_kernels import implementations
from varjax import arguments, generator
from varjax.api import USUAL_BATCH
from varjax.cache.plan import KV_DTYPES
from varjax.cli.flags import CommandFlags
from varjax.codecs import arithmetic
from varjax.engine import program
from varjax.model import DTYPES, WEIGHTS_DTYPES

AUTO = "auto"


# --- sizes ---


def mesh(flags: CommandFlags) -> FlagHolder[str]:
    return flags.string(
        "mesh",
        None,
        "Devices to split over: data=4 (images), data=4,model=2 (also heads and weights); "
        "one axis may be -1: what is left over.",
    )


def batch_size(
    flags: CommandFlags, default: int, help: str = "Images per program call."
) -> FlagHolder[int]:
    """For a command that takes the number as it is."""
    return flags.integer(
        "batch_size", default, help, lower_bound=1, upper_bound=arguments.LARGEST_BATCH
    )


def batch_size_that_fits(flags: CommandFlags) -> FlagHolder[int]:
    """For a command that chooses the number where it is not given, and checks it."""
    usual = f"Images per program call; default: {USUAL_BATCH}, or what fits."
    return flags.integer("batch_size", None, usual)


def decode_batch(flags: CommandFlags) -> FlagHolder[int]:
    return flags.integer(
        "decode_batch",
        None,
        "Images decoded to pixels at a time, which lowers the peak; default: what takes 2 GiB.",
        lower_bound=1,
    )


# --- types ---


def dtype(flags: CommandFlags, default: str | None, of: str) -> FlagHolder[str]:
    """default: None is float32 on CPU, else bfloat16. of: what has that type."""
    usual = "" if default else "; default: float32 on CPU, else bfloat16"
    return flags.enum("dtype", default, sorted(DTYPES), f"Type of {of}{usual}.")


def weights_dtype(flags: CommandFlags) -> FlagHolder[str]:
    return flags.enum(
        "weights_dtype",
        None,
        list(WEIGHTS_DTYPES),
        "Type of stored weights; default: --dtype, in which products run. int8: the matrices "
        "of the transformer's layers, with a scale per output channel. w8a8, fp8: activations, "
        "too, with a scale per row, on chips that multiply such numbers.",
    )


def kv_dtype(flags: CommandFlags) -> FlagHolder[str]:
    return flags.enum(
        "kv_dtype",
        None,
        list(KV_DTYPES),
        "Type of stored keys and values; default: --dtype. A budget is a fraction of a full cache "
        "of this type. int8 has a scale per token. What --compare compares with has --dtype.",
    )


def decode_dtype(flags: CommandFlags) -> FlagHolder[str]:
    return flags.enum(
        "decode_dtype",
        arithmetic.AUTO,
        list(arithmetic.CHOICES),
        "What the decoder of pixels computes in: auto is float32 on CPUs, else bfloat16, which "
        "is faster and rounds pixels; tf32 (NVIDIA GPUs) rounds them less; float32 exactly.",
    )


def matmul_precision(flags: CommandFlags) -> FlagHolder[str]:
    return flags.enum(
        "matmul_precision",
        "default",
        list(generator.MATMUL_PRECISIONS),
        "Precision of float32 products.",
    )


# --- programs ---


def segments(flags: CommandFlags) -> FlagHolder[str]:
    return flags.string(
        "segments",
        "auto",
        "How many segments the scale loop is cut into: auto or a number. Results do not change.",
    )


def layers(flags: CommandFlags) -> FlagHolder[str]:
    return flags.enum(
        "layers",
        "auto",
        list(program.LAYERS),
        "scan: one compiled body for all layers; unroll: a body per layer, which copies no "
        "weights but takes longer to compile; auto: unroll large models, but not on TPUs.",
    )


def attention(flags: CommandFlags, elsewhere: bool) -> FlagHolder[str]:
    """elsewhere: programs are compiled for chips that are not here, and nothing interprets
    kernels."""
    names = ("reference", *implementations.PLATFORMS) if elsewhere else implementations.NAMES
    stepwise = "" if elsewhere else "; -interpret runs a kernel step by step anywhere, slowly"
    return flags.enum(
        "attention",
        AUTO,
        [AUTO, *names],
        f"Attention and cache writing: auto takes mosaic on GPUs from Hopper on, triton on "
        f"others, tpu on TPU, else reference{stepwise}.",
    )
