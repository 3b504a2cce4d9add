"""The program that decodes pixels, before and after it is compiled: in which arithmetic, how many
images at once, and the memory that this takes.

As in `varjax.generation.program`, arguments may be arrays or `jax.ShapeDtypeStruct`s.
"""

import os
from dataclasses import dataclass

import jax
from flax import nnx
from jax.experimental.layout import Format
from jaxtyping import Array, Float

from varjax.codecs import arithmetic
from varjax.core.segments import map_in_chunks
from varjax.generation import program
from varjax.generation.sharding import ShardedProgram

DECODER_BYTES = 2 * 2**30  # activations that decoding may take at once
# Convolutions by the first algorithm that cuDNN's heuristics name. By default XLA runs them all,
# with inputs, results and workspaces of their own: 51 GiB were seen. `xla_gpu_autotune_level=0`
# would compile convolutions without any algorithm (docs/lab/precision.md).
UNTUNED = {"xla_gpu_exclude_nondeterministic_ops": True}
# One CUDA graph for the whole program: XLA's own choice, and convolutions. Without these they were
# 36 graphs and 41 single kernels, and the GPU waited for their starts (docs/lab/h100.md).
ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONVOLUTION"
}


@dataclass(frozen=True)
class Decoding:
    """The way from codes to pixels of a codec (`varjax.codecs.autoencoder`).

    dtype: one of `arithmetic.DTYPES`.
    at_once: images that are decoded together; None: as many as `DECODER_BYTES` allow.
    """

    dtype: str = arithmetic.FLOAT32
    at_once: int | None = None

    def images_at_once(self, codec: nnx.Module, code_map: tuple[int, int], images: int) -> int:
        """The number of so many images that are decoded together. code_map: size of the latent
        map."""
        fitting = DECODER_BYTES // self.image_bytes(codec, code_map)
        return max(1, min(images, self.at_once or fitting))

    def image_bytes(self, codec: nnx.Module, code_map: tuple[int, int]) -> int:
        """Estimates what decoding one image takes: six activations of the largest resolution."""
        height, width = (side * codec.config.downsample for side in code_map)
        item = arithmetic.arrays(self.dtype).itemsize
        # widths[0] belongs to the finest level, which has the most pixels; codecs of the user's own
        # may have no levels
        levels = getattr(codec.config, "decoder", None)
        return 6 * height * width * (levels.widths[0] if levels else 3) * item


def trace_pixels(
    codec: nnx.Module,
    code_map: Array | jax.ShapeDtypeStruct,
    decoding: Decoding,
    *,
    formats: tuple[Format, ...] | None = None,
    sharded: ShardedProgram | None = None,
) -> jax.stages.Traced:
    """Traces the program `(weights, code_map [B, P, Q, C]) -> images [B, H, W, 3]`, which are
    float32 in [0, 1].

    weights: the arrays of the codec.
    formats: where and how they lie (`Compiled.input_formats`); None: as usual.
    sharded: the program of a mesh, for several devices.
    """
    where = {} if formats is None else {"in_shardings": (formats, None)}
    leaves, tree = jax.tree.flatten(codec)
    weights = tuple(leaves)
    if sharded is not None:
        # each device decodes its own images
        over_images = sharded.over_images(lambda *local: _pixels(*local, tree, decoding))
        return jax.jit(over_images, **where).trace(weights, code_map)
    # one function for all generators, not a closure each: JAX then traces it once per model
    traced = jax.jit(_pixels, static_argnums=(2, 3), **where)
    return traced.trace(weights, code_map, tree, decoding)


def _pixels(weights: tuple[Array, ...], code_map, tree, decoding: Decoding):
    return decode(tree.unflatten(weights), code_map, decoding)


def decode(
    codec: nnx.Module, code_map: Float[Array, "B P Q C"], decoding: Decoding
) -> Float[Array, "B H W 3"]:
    """Pixels in [0, 1], float32."""
    images = code_map.shape[0]
    at_once = decoding.images_at_once(codec, code_map.shape[1:3], images)
    return map_in_chunks(
        lambda index: (codec.decode(code_map[index], dtype=decoding.dtype) + 1) / 2, images, at_once
    )


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """Options of the compiler, where `XLA_FLAGS` do not say otherwise: as for others
    (`program.compiler_options`), and on GPUs as one graph, without running all algorithms of its
    convolutions."""
    options = program.compiler_options(platform)
    if platform != "gpu":
        return options
    given = os.environ.get("XLA_FLAGS", "")
    if not any(name in given for name in (*UNTUNED, "xla_gpu_autotune")):
        options |= UNTUNED
    if not any(name in given for name in ONE_GRAPH):
        options |= ONE_GRAPH
    return options
