"""Choosing tokens on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend. See `api.sample`.

Tiling. It is that of the Triton kernel (`triton`), with one warpgroup per token, which holds rows
of up to `MOST` numbers in its registers. Numbers come straight from global memory. Every number is
read by one thread, 16 bytes at a time where rows begin at multiples of 16 bytes, so shared memory
would only be a detour.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import estimates
from pallas_kernels.implementations import require
from pallas_kernels.sample import row
from pallas_kernels.sample.row import Parts
from pallas_kernels.shared import mosaic_operands as mosaic

MOST = 4096  # numbers: 32 per thread from each of two arrays
THREADS = 128


def sample(logits, noise, *, tau, strength, top_k: int, top_p: float, interpret):
    """See `api.sample`."""
    vocabulary = noise.shape[-1]
    takes = f"Mosaic chooses from {THREADS} tokens on, not from {vocabulary}"
    require(vocabulary >= THREADS, takes)
    mosaic.check_simulator(interpret)

    def run(parts, given, logits, noise):
        images, tokens, _ = noise.shape
        # not `plgpu.kernel`, which takes no estimate
        return pl.kernel(
            partial(_kernel, parts, top_k, top_p),
            out_type=jax.ShapeDtypeStruct((images, tokens), jnp.int32),
            mesh=plgpu.Mesh(grid=(tokens, images), grid_names=("token", "image")),
            compiler_params=plgpu.CompilerParams(lowering_semantics=mosaic.LANES),
            cost_estimate=estimates.sample(logits, noise, top_k, top_p),
            interpret=mosaic.simulator(interpret),
            name="sample",
        )(given, logits, noise)

    return row.sample(run, MOST, logits, noise, tau, strength, top_k, top_p)


def _kernel(parts: Parts, top_k: int, top_p: float, given, logits, noise, found):
    token, image = jax.lax.axis_index("token"), jax.lax.axis_index("image")
    # 4 numbers are 16 bytes, the longest load of a thread
    width = 4 if parts.length % 4 == 0 and parts.size % (4 * THREADS) == 0 else 1
    layout = plgpu.Layout.WG_STRIDED((parts.size,), vec_size=width)

    def number(start):
        return start + plgpu.broadcasted_iota(jnp.int32, (parts.size,), 0, layout=layout)

    def load(ref, *places):
        *lead, start = places
        here = ref.at[*lead, image, token, pl.ds(start, parts.size)]
        return mosaic.load(here, layout, plain=True)

    guided = row.guided(parts, partial(load, logits), logits.shape[0], number, given)
    found[image, token] = row.choose(guided, partial(load, noise), number, top_k, top_p)
