"""What a user may choose about programs (`Build`), and what follows from it for a model: the static
side of the program that draws, and how weights are arranged for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from pallas_kernels import implementations
from varjax.codecs import arithmetic
from varjax.core import arguments, segments
from varjax.core.errors import UserError, choose
from varjax.core.next_token import NextTokenTransformer
from varjax.core.plan import KV_DTYPES, CachePlan
from varjax.core.sampling import Sampling
from varjax.core.scales import ScaleSpec
from varjax.core.segments import Segment
from varjax.core.sequence import AUTO, SCAN, TOKENS, Schedule
from varjax.core.step import cache_step
from varjax.core.tokens import TokenSpec, token_step
from varjax.fast import arrange, quantized
from varjax.generation.mesh import MeshSpec
from varjax.generation.pixels import Decoding

UNROLL = "unroll"
LAYERS = (AUTO, SCAN, UNROLL)
MATMUL_PRECISIONS = ("default", "highest")
# Weights of the layers of small models at most: copying them is soon done, and unrolled layers and
# more segments take longer to compile.
SCANNED_BYTES = 64 * 2**20
# Rows of a product that take as long as one: FLOPs per second over bytes per second, in bfloat16 on
# accelerators (H200 183, A100 and TPUs 150 to 250), in float32 on a CPU.
FREE_ROWS = {"cpu": 16, "gpu": 192, "tpu": 192}


@dataclass(frozen=True, kw_only=True)
class Build:
    """Choices of how programs are built, and what they return or tell beside images. `UserError`
    for values that work nowhere.

    segments: how the scale loop is cut (`varjax.core.segments`); results do not depend on it.
    layers: "scan" or "unroll"; "auto" takes what is faster here (`arrange_layers`) and fits
      (`memory.layers_that_fit`). The model's weights are arranged accordingly.
    attention: implementation of the kernels; None takes what the platform has.
    matmul_precision: "default" or "highest", of float32 products.
    keep_logits: also return guided logits.
    keep_contents: also return which tokens the cache holds after every scale or decision,
      "contents", which `generation.kept` reads; one device.
    decode_batch: images decoded at once; None: as many as 2 GiB of activations allow.
    decode_dtype: what the decoder of pixels computes in: "bfloat16", "tf32" or "float32"
      (`varjax.codecs.arithmetic`); "auto" is "float32" on a CPU, else "bfloat16".
    watch: called on the host while images are drawn: with the number of a scale and the code map
      [B, P, Q, C] after it, or the number of an image token and the tokens [B, 1]. JAX does not
      keep such programs in its cache.
    """

    segments: int | str = AUTO
    layers: str = AUTO
    attention: str | None = None
    matmul_precision: str = "default"
    keep_logits: bool = False
    keep_contents: bool = False
    decode_batch: int | None = None
    decode_dtype: str = arithmetic.AUTO
    watch: Callable[[Array, Array], None] | None = None

    def __post_init__(self):
        choose("layers", self.layers, LAYERS)
        choose("matmul_precision", self.matmul_precision, MATMUL_PRECISIONS)
        if self.attention is not None:
            choose("attention", self.attention, implementations.NAMES)
        for name in ("keep_logits", "keep_contents"):
            object.__setattr__(self, name, arguments.flag(name, getattr(self, name)))
        if self.decode_batch is not None:
            most = arguments.LARGEST_BATCH
            count = arguments.integer("decode_batch", self.decode_batch, 1, most)
            object.__setattr__(self, "decode_batch", count)
        if not (self.watch is None or callable(self.watch)):
            raise arguments.wrong("watch", self.watch, "give a function of (number, array) or None")

    @property
    def decoding(self) -> Decoding:
        """The way from codes to pixels, once it is known in which arithmetic."""
        return Decoding(self.decode_dtype, self.decode_batch)

    def here(self) -> "Build":
        """This build with the arithmetic of pixels here. `UserError` without what was asked for."""
        if self.attention and (reason := implementations.why_not_here(self.attention)):
            stepwise = implementations.step_by_step(self.attention)
            ways = ", ".join(filter(None, ("reference", stepwise)))
            raise UserError(f"attention={reason}: choose {ways} or None")
        return replace(self, decode_dtype=arithmetic.resolve(self.decode_dtype))


# --- the weights ----------------------------------------------------------------------------------


def arrange_layers(
    networks: Mapping[str, nnx.Module], how: str, platform: str, groups: int = 1
) -> None:
    """Stacks the weights of the transformer's layers, or takes them apart (`varjax.fast.arrange`).
    The modules are changed.

    how: "scan" stacks them: one compiled body for all layers. Except on a TPU it copies the weights
      of a layer before it uses them. "unroll" separates them: a body per layer, nothing is copied.
      "auto" is "unroll" for large models on GPUs and CPUs, else "scan". Models that draw token by
      token always have separate ones, as a scan would copy every layer's weights for every token.
    platform: "cpu", "gpu" or "tpu". groups: devices that divide them.
    """
    transformer = networks["transformer"]
    if isinstance(transformer, NextTokenTransformer):
        # On a CPU the right operand of a product is rearranged in every call. Turned matrices are
        # the left one, which pays for the few rows of a token (docs/lab/cpu.md). Weights that are
        # divided over devices are multiplied as they lie.
        turned = platform == "cpu" and groups == 1
        arrange.separate(transformer.blocks, transformer.once, turned=turned)
        return
    large = arrange.product_bytes(transformer.blocks, transformer.once) > SCANNED_BYTES
    if how == UNROLL or (how == AUTO and platform != "tpu" and large):
        arrange.separate(transformer.blocks, transformer.once)
    else:
        arrange.restack(transformer.blocks)


# --- the static side ------------------------------------------------------------------------------


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


def specify(
    networks: Mapping[str, nnx.Module],
    plan: CachePlan,
    sampling: Sampling,
    build: Build,
    *,
    batch_size: int,
    mesh: MeshSpec,
    platform: str,
) -> ScaleSpec | TokenSpec:
    """The static side of the program for the model of a plan. `UserError` for segments or sampling
    that do not fit, or a plan for another number of rows. batch_size: images on the whole mesh."""
    config, planned, kernels = networks["transformer"].config, plan.geometry, build.attention
    planned.schedule.check_cut(build.segments, build.layers)
    if build.keep_contents and mesh.num_devices > 1:
        raise UserError("keep_contents works on one device: leave out mesh")
    # guidance runs an unconditional row beside the conditional one, with a cache of its own
    rows = 1 + config.is_guided(config.check_sampling(sampling))
    if planned.rows_per_image != rows:
        raise UserError(
            f"the cache plan is for {planned.rows_per_image} rows per image, guidance "
            f"{sampling.guidance} takes {rows}: plan with the geometry of this sampling "
            f"(`Model.geometry_for`)"
        )
    keep = build.keep_logits, build.keep_contents
    if planned.kind == TOKENS:
        layers = tuple(token_step(plan, i, kernels) for i in range(planned.num_layers))
        return TokenSpec(plan, layers, sampling, kernels, *keep, build.watch)
    # The cut depends on the rows that one device multiplies: few rows make padding free.
    rows = rows * batch_size // mesh.data or 1
    cuts = plan_segments(networks, planned.schedule, build.segments, rows, platform)
    cache = tuple(cache_step(plan, segment.scales, kernels) for segment in cuts)
    return ScaleSpec(plan, cuts, cache, sampling, kernels, *keep, build.watch, mesh.model)


def pool_dtype(asked: str | np.dtype | None, dtype) -> np.dtype:
    """The type of a pool: as asked, checked, or that of the computation."""
    if asked is None:
        return jnp.dtype(dtype)
    return jnp.dtype(arguments.dtype("kv_dtype", asked, KV_DTYPES))
