"""The program that draws codes, before it is compiled, and what it shares with the one that decodes
pixels (`varjax.engine.pixels`).

`varjax.generator` compiles both for the device that is there, `experiments.aot` for chips that are
absent. Both therefore compile the same thing. Arguments may be arrays or `jax.ShapeDtypeStruct`s,
whose `sharding` names the device.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout
from jaxtyping import Array, PyTree

from pallas_kernels import implementations
from varjax.engine import compilation_cache, segments
from varjax.engine.segments import Segment
from varjax.errors import UserError, choose
from varjax.nn import arrange, quantized
from varjax.nn.schemes import INT8
from varjax.schedule import Schedule

# Where the compiler chooses how the weights lie, because it would copy stacked ones otherwise.
AUTO_LAYOUT_PLATFORMS = ("tpu",)
AUTO, SCAN, UNROLL = LAYERS = ("auto", "scan", "unroll")
# Weights of the layers of small models at most: copying them is soon done, and unrolled layers and
# more segments take longer to compile.
SCANNED_BYTES = 64 * 2**20
# Rows of a product that take as long as one: FLOPs per second over bytes per second, in bfloat16 on
# accelerators (H200 183, A100 and TPUs 150 to 250), in float32 on a CPU.
FREE_ROWS = {"cpu": 16, "gpu": 192, "tpu": 192}
# Memories on the chip. A kernel that has used one up says the same words as a full device, but no
# smaller batch helps.
ON_CHIP = ("vmem", "smem", "shared memory", "tmem", "registers")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """A user's choices of how the program is built; results do not depend on them.

    segments: how the scale loop is cut (`segments.plan_segments`).
    layers: how the weights of layers lie (`arrange_layers`).
    attention: implementation of the kernels; None takes what the platform has.
    keep_logits: also return guided logits.
    keep_contents: also return what the cache holds after every scale (`Generator`).
    watch: called on the host while images are drawn (`Generator`).
    """

    segments: int | str = segments.AUTO
    layers: str = AUTO
    attention: str | None = None
    keep_logits: bool = False
    keep_contents: bool = False
    watch: Callable[[Array, Array], None] | None = None


def trace_codes(
    networks: Mapping[str, nnx.Module],
    state: PyTree[Array],
    arguments: tuple,
    program: Callable,
    *,
    precision: str = "default",
    auto_layout: bool = False,
) -> jax.stages.Traced:
    """Traces the program `(networks, state, *arguments) -> (results, state)`. The state is donated:
    the program updates the caller's buffers.

    arguments: condition, keys, inputs, given (`ScaleSpec.generate`).
    program: `generate` of a `ScaleSpec` or `TokenSpec`, or the `ShardedProgram` of a mesh; shapes
      then carry its `shardings`.
    precision: "default" or "highest", of float32 products.
    auto_layout: say how arrays lie in memory (TPU). The compiler chooses for the weights; the
      caller puts them there, see `place`. The cache lies row by row; the caller makes it so
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

        def somewhere(leaf: Array | np.ndarray | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            where = getattr(leaf, "sharding", None) or here
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        networks, state = jax.tree.map(somewhere, (networks, state))
        weights = jax.tree.map(lambda a: Format(Layout.AUTO, a.sharding), networks)
        cache = jax.tree.map(lambda a: Format(Layout(tuple(range(a.ndim))), a.sharding), state)
        where["in_shardings"] = (weights, cache, *(None,) * len(arguments))
        where["out_shardings"] = (None, cache)
    as_it_is = precision == "default"
    # part of the trace: it has to be set here, not around calls of the compiled program
    with contextlib.nullcontext() if as_it_is else jax.default_matmul_precision(precision):
        return jax.jit(program, donate_argnums=(1,), **where).trace(networks, state, *arguments)


def compiler_options(
    platform: str, *, few_rows: bool = False, weights_dtype: str | None = None
) -> dict[str, bool | str]:
    """Options of the compiler for a program, where `XLA_FLAGS` do not say otherwise.

    GPU: products by the libraries, which add biases and apply GELU on the way; XLA's own products
    by Triton are sums of parts in most layers, which another kernel adds up and finishes. Decoding
    several images of LlamaGen would not compile for an A100 with them: jax 0.10.2 finds no tiles.
    But libraries take matrices in the type of the product only, and so would make a copy of every
    int8 matrix in each call; Triton's products convert as they read. Where activations are in 8
    bits, too, libraries multiply both operands as they are.
    CPU: products, convolutions and sums by Eigen in place of YNNPACK, 10 to 30 % faster for whole
    scales and pictures (docs/lab/cpu.md). With the few rows of a token YNNPACK is faster.

    few_rows: whether products have the few rows of a token, as `ScaleSpec.few_rows` says of
      programs that draw codes.
    weights_dtype: how its matrices are stored, `Model.weights_dtype`.
    """
    if platform == "gpu" and weights_dtype != INT8:
        name, value = "xla_gpu_enable_triton_gemm", False
    elif platform == "cpu" and not few_rows:
        name, value = "xla_cpu_experimental_ynn_fusion_type", ""
    else:
        return {}
    # who has set the flag has decided
    return {} if name in os.environ.get("XLA_FLAGS", "") else {name: value}


def arrange_layers(networks: Mapping[str, nnx.Module], how: str, platform: str) -> None:
    """Stacks the weights of the transformer's layers, or takes them apart (`varjax.nn.arrange`).
    The modules are changed.

    how: "scan" stacks them: one compiled body for all layers. Except on a TPU it copies the weights
      of a layer before it uses them. "unroll" separates them: a body per layer, nothing is copied.
      "auto" is "unroll" for large models on GPUs and CPUs, else "scan".
    platform: "cpu", "gpu" or "tpu".
    """
    transformer = networks["transformer"]
    large = arrange.product_bytes(transformer.blocks, transformer.once) > SCANNED_BYTES
    if how == UNROLL or (how == AUTO and platform != "tpu" and large):
        arrange.separate(transformer.blocks, transformer.once)
    else:
        arrange.restack(transformer.blocks)


def plan_segments(
    networks: Mapping[str, nnx.Module],
    schedule: Schedule,
    wanted: int | str,
    rows: int,
    platform: str,
) -> tuple[Segment, ...]:
    """Cuts the scale loop for this model on this platform (`segments.plan_segments`).

    wanted: how many segments, or "auto".
    rows: cache rows of one device.
    """
    # In a small program the bodies' compile time counts, in a large one what padding costs.
    transformer = networks["transformer"]
    if arrange.product_bytes(transformer.blocks, transformer.once) <= SCANNED_BYTES:
        return segments.plan_segments(schedule, wanted)
    tile = segments.TILE if quantized.scheme_of_rows(transformer) is None else segments.TILE_8_BITS
    return segments.plan_segments(schedule, wanted, rows, FREE_ROWS[platform], tile)


def place(networks: Mapping[str, nnx.Module], formats: PyTree[Format]) -> None:
    """Puts the weights where a program wants them, in the layout that it wants
    (`Compiled.input_formats[0][0]`). The modules are changed, one array at a time, so that the
    weights never exist twice. Arrays that lie right already stay."""
    held = jax.tree.leaves(networks, is_leaf=lambda x: isinstance(x, nnx.Variable))
    # formats have one leaf per array, in the order in which JAX flattens the networks
    wanted = iter(jax.tree.leaves(formats))
    for variable in held:
        arrays, tree = jax.tree.flatten(variable.get_value())  # several where layers are separate
        pairs = [(array, next(wanted)) for array in arrays]
        if any(array.format != where for array, where in pairs):
            placed = [a if a.format == where else jax.device_put(a, where) for a, where in pairs]
            variable.set_value(tree.unflatten(placed))


def compile_codes(
    traced: jax.stages.Traced, *, few_rows: bool, weights_dtype: str
) -> tuple[jax.stages.Compiled, str]:
    """Compiles the program of `trace_codes` for the device that is there; also what the compilation
    cache did (`Timing.cache`). few_rows, weights_dtype: as in `compiler_options`."""
    how = {"few_rows": few_rows, "weights_dtype": weights_dtype}
    options = compiler_options(jax.default_backend(), **how)
    lowered = traced.lower()
    # this program only: helpers compile too quickly to be kept, and look cold
    before = compilation_cache.events.copy()
    compiled = lowered.compile(compiler_options=options)
    return compiled, compilation_cache.verdict(before)


def check_attention(implementation: str | None) -> None:
    """Raises `UserError` unless this implementation of the kernels runs on this machine."""
    if implementation is None:
        return
    choose("attention", implementation, implementations.NAMES)
    if reason := implementations.why_not_here(implementation):
        stepwise = implementations.step_by_step(implementation)
        ways = ", ".join(filter(None, ("reference", stepwise)))
        raise UserError(f"attention={reason}: choose {ways} or None")


# --- errors of a device or its compiler, with what to do about them ---


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
