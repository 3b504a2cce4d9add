"""The program that draws codes, before it is compiled, and what it shares with the one that decodes
pixels (`varjax.generation.pixels`).

`varjax.generation.compiled` compiles both for the device that is there, `experiments.aot` for chips
that are absent. Both therefore compile the same thing. Arguments may be arrays or
`jax.ShapeDtypeStruct`s, whose `sharding` names the device.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

import jax
from jax.experimental.layout import Format, Layout
from jaxtyping import Array, PyTree

from pallas_kernels import implementations, jax_versions
from varjax.core.errors import UserError
from varjax.fast.schemes import INT8

# Where the compiler chooses how the weights lie, because it would copy stacked ones otherwise.
AUTO_LAYOUT_PLATFORMS = ("tpu",)
TRIED = 16  # algorithms of a library for a product
# While it profiles, XLA would start the kernels of CUDA graphs one by one.
GRAPHS_IN_PROFILES = "xla_enable_command_buffers_during_profiling"
# Memories on the chip. A kernel that has used one up says the same words as a full device, but no
# smaller batch helps.
ON_CHIP = ("vmem", "smem", "shared memory", "tmem", "registers")


def jit_codes(
    run: Callable,
    weights: tuple[Array, ...],
    state: PyTree[Array],
    arguments: tuple,
    *,
    auto_layout: bool = False,
) -> tuple[jax.stages.Wrapped, tuple]:
    """The program `(weights, state, *arguments) -> (results, state)`, jitted, and what it is traced
    with. The state is donated: the program updates the caller's buffers.

    run: the function (`compiled.flat`), or the `ShardedProgram` of a mesh; shapes then carry its
      `shardings`.
    arguments: condition, keys, inputs (`varjax.core.decode`).
    auto_layout: say how arrays lie in memory (TPU). The compiler chooses for the weights; the
      caller puts them there (`Weights.place`). The cache lies row by row; the caller makes it so
      (`Compiled.input_formats`).
    """
    # The pool is the largest buffer. Without donation the program would allocate a second one for
    # its result.
    where = {}
    if auto_layout:
        # A TPU's compiler would copy stacked weights into another layout in every call: they lie as
        # it likes. The cache lies as the kernels read it, which is not how a TPU puts an array of
        # 16 heads of 595 slots by itself: the pool would be copied, and exist twice.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def somewhere(leaf: Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            where = getattr(leaf, "sharding", None) or here
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        weights, state = jax.tree.map(somewhere, (weights, state))
        chosen = jax.tree.map(lambda a: Format(Layout.AUTO, a.sharding), weights)
        cache = jax.tree.map(lambda a: Format(Layout(tuple(range(a.ndim))), a.sharding), state)
        where["in_shardings"] = (chosen, cache, *(None,) * len(arguments))
        where["out_shardings"] = (None, cache)
    return jax.jit(run, donate_argnums=(1,), **where), (weights, state, *arguments)


def products(precision: str) -> contextlib.AbstractContextManager[None]:
    """Float32 products of what is traced inside are "default" or "highest". Around calls of a
    compiled program it does nothing."""
    as_it_is = precision == "default"
    return contextlib.nullcontext() if as_it_is else jax.default_matmul_precision(precision)


def compiler_options(
    platform: str, *, few_rows: bool = False, weights_dtype: str | None = None
) -> dict[str, bool | int | str]:
    """Options of the compiler for a program, where `XLA_FLAGS` do not say otherwise.

    GPU: products by the libraries, which add biases and apply GELU on the way; XLA's own products
    by Triton are sums of parts in most layers, which another kernel adds up and finishes. Decoding
    several images of LlamaGen would not compile for an A100 with them: jax 0.10.2 finds no tiles.
    But libraries take matrices in the type of the product only, and so would make a copy of every
    int8 matrix in each call; Triton's products convert as they read. Where activations are in 8
    bits, too, libraries multiply both operands as they are. XLA tries `TRIED` of the library's
    algorithms for each product, those that the library thinks best, in place of up to 128.
    CPU: products, convolutions and sums by Eigen in place of YNNPACK, 10 to 30 % faster for whole
    scales and pictures (docs/lab/cpu.md). With the few rows of a token YNNPACK is faster.

    few_rows: whether products have the few rows of a token.
    weights_dtype: how its matrices are stored, `Model.weights_dtype`.
    """
    options = {}
    if platform == "gpu":
        options[GRAPHS_IN_PROFILES] = True
        options |= {"xla_gpu_blas_max_algorithms": TRIED} if jax_versions.LIMITS_ALGORITHMS else {}
        options |= {"xla_gpu_enable_triton_gemm": False} if weights_dtype != INT8 else {}
    elif platform == "cpu" and not few_rows:
        options["xla_cpu_experimental_ynn_fusion_type"] = ""
    given = os.environ.get("XLA_FLAGS", "")  # who has set a flag has decided
    return {name: value for name, value in options.items() if name not in given}


# --- errors of a device or its compiler, with what to do about them ---


class OutOfMemory(UserError):
    """The device has less memory than the program takes, whatever was predicted."""


@contextlib.contextmanager
def explained(doing: str, attention: str | None) -> Iterator[None]:
    """Explains errors of the device while `doing` something: `OutOfMemory` if its memory does not
    suffice. `NotImplementedError`, of a kernel that cannot take the shapes, is passed on as it is;
    any other one is a mistake of ours or of a compiler, and gets a note that says how to do without
    kernels. attention: the implementation of its kernels; None: the best here."""
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
        attention = attention or implementations.preferred()
        if of_jax and attention != "reference":
            error.add_note(
                f"{doing} failed with kernels ({attention}): if one of them is to blame, "
                f"attention='reference' (--attention=reference) does without"
            )
        raise
