"""The two programs of a run, before they are compiled: drawing codes, and decoding pixels.

`Generator` compiles them for the device that is there, `experiments.aot` for chips that are
not; so both compile the same thing. Arguments may be arrays or `jax.ShapeDtypeStruct`s (whose
`sharding` names the device).
"""

import contextlib
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.experimental.layout import Format, Layout
from jaxtyping import Array, Float

from varjax.cache.state import KVState
from varjax.engine import scales
from varjax.engine.chunks import map_in_chunks
from varjax.parallel.sharding import ShardedProgram

# Where the compiler chooses how the weights lie, because it would copy stacked ones otherwise.
AUTO_LAYOUT_PLATFORMS = ("tpu",)
DECODER_BYTES = 2 * 2**30  # activations that decoding may take at once


def lower_codes(
    pipeline: Any,
    state: KVState,
    arguments: tuple,
    spec: scales.ProgramSpec,
    *,
    precision: str = "default",
    auto_layout: bool = False,
    sharded: ShardedProgram | None = None,
) -> jax.stages.Lowered:
    """The program `(pipeline, state, *arguments) -> (results, state)` of `engine.generate_codes`.

    The state is donated.

    Args:
      arguments: condition, keys, tables, given (`engine.generate_codes`).
      precision: "default" or "highest", of float32 products.
      auto_layout: let the compiler choose how the weights lie in memory (TPU: stacked weights are
        not copied into another layout in every call); the caller puts them there, see `place`.
      sharded: for several devices: the program of a mesh; state and tables are then those of its
        `ShardedPlan`, and shapes carry its `shardings`.
    """
    program = sharded or partial(scales.generate_codes, spec=spec)
    where = {}
    if auto_layout:
        pipeline = jax.tree.map(_somewhere, pipeline)
        formats = jax.tree.map(lambda a: Format(Layout.AUTO, a.sharding), pipeline)
        where["in_shardings"] = (formats, *(None,) * (1 + len(arguments)))
    with _matmul_precision(precision):
        return jax.jit(program, donate_argnums=(1,), **where).lower(pipeline, state, *arguments)


def lower_pixels(
    pipeline: Any,
    code_map: Any,
    *,
    precision: str = "default",
    formats: Any = None,
    sharded: ShardedProgram | None = None,
    at_once: int | None = None,
) -> jax.stages.Lowered:
    """The program `(pipeline, code_map [B, P, Q, C]) -> images [B, H, W, 3]`.

    at_once: see `decode`.
    formats: where and how the pipeline's arrays lie, if not as usual (`Compiled.input_formats`).
    """
    where = {} if formats is None else {"in_shardings": (formats, None)}
    with _matmul_precision(precision):
        program = partial(decode, at_once=at_once)
        program = program if sharded is None else sharded.over_images(program)
        return jax.jit(program, **where).lower(pipeline, code_map)


def decode(
    pipeline: Any, code_map: Float[Array, "B P Q C"], *, at_once: int | None = None
) -> Float[Array, "B H W 3"]:
    """Pixels of a batch, `at_once` images at a time; None: as many as `DECODER_BYTES` allow."""
    images = code_map.shape[0]
    at_once = at_once or decoder_batch(pipeline.codec, code_map.shape[1:3], images)
    return map_in_chunks(lambda index: pipeline.decode(code_map[index]), images, at_once)


def decoder_batch(codec: Any, code_map: tuple[int, int], images: int) -> int:
    """How many images are decoded at once. code_map: height and width of the latent map."""
    return max(1, min(images, DECODER_BYTES // decoder_bytes(codec, code_map)))


def decoder_bytes(codec: Any, code_map: tuple[int, int]) -> int:
    """Estimate of what decoding one image takes: six activations of the widest resolution."""
    height, width = (side * codec.config.downsample for side in code_map)
    return 6 * height * width * codec.config.decoder_width * 4


def place(pipeline: Any, formats: Any) -> None:
    """Put a pipeline's arrays where, and lay them out as, a program wants them
    (`Compiled.input_formats[0][0]`). The modules are changed, one array at a time, so that the
    weights never exist twice; arrays that fit already stay."""
    held = jax.tree.leaves(pipeline, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for variable, wanted in zip(held, jax.tree.leaves(formats), strict=True):
        array = variable.get_value()
        if array.format != wanted:
            variable.set_value(jax.device_put(array, wanted))


def _somewhere(leaf) -> jax.ShapeDtypeStruct:
    """Shape, type and device of an array, its layout left open."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(
        jax.devices()[0]
    )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _matmul_precision(name: str):
    if name == "highest":
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
