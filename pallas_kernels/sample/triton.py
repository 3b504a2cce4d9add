"""Choosing tokens on NVIDIA GPUs with Pallas-Triton. See `api.sample`.

Tiling. A program serves a token and holds its row in registers (`row`), up to `MOST` numbers. From
longer rows it reads a part whenever it needs it, out of the multiprocessor's or the chip's cache.
There XLA does the guidance, which would double the reads, and all of it where nothing is filtered.

Traffic. Every logit and every number of noise moves once, 4 (R + B) T V bytes. Rows that are not
held take 8 B T V more, and 64 times 4 B T V from the caches.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import estimates
from pallas_kernels.sample import row
from pallas_kernels.sample.row import Parts

MOST = 16384
PER_WARP = 1024  # numbers: 32 per thread from each of two arrays


def sample(logits, noise, *, tau, strength, top_k: int, top_p: float, interpret: bool):
    """See `api.sample`."""

    def run(parts, given, logits, noise):
        images, tokens, vocabulary = noise.shape
        warps = max(1, pl.cdiv(min(MOST, parts.count * parts.size), PER_WARP))
        return pl.pallas_call(
            partial(_kernel, parts, top_k, top_p),
            grid=(tokens, images),
            in_specs=[
                jax.tree.map(lambda _: pl.BlockSpec((1,), lambda t, b: (0,)), given),
                pl.BlockSpec((len(logits), None, None, vocabulary), lambda t, b: (0, b, t, 0)),
                pl.BlockSpec((None, None, vocabulary), lambda t, b: (b, t, 0)),
            ],
            out_specs=pl.BlockSpec((None, 1), lambda t, b: (b, t)),
            out_shape=jax.ShapeDtypeStruct((images, tokens), jnp.int32),
            # one stage: what a part is computed from comes from caches, nothing is loaded ahead
            compiler_params=plgpu.CompilerParams(num_warps=pl.next_power_of_2(warps), num_stages=1),
            cost_estimate=estimates.sample(logits, noise, top_k, top_p),
            interpret=interpret,
            name="sample",
        )(given, logits, noise)

    return row.sample(run, MOST, logits, noise, tau, strength, top_k, top_p)


def _kernel(parts: Parts, top_k: int, top_p: float, given, logits, noise, found):
    def number(start):
        return start + jnp.arange(parts.size, dtype=jnp.int32)

    def load(ref, *places):
        *lead, start = places
        return ref[*lead, pl.ds(start, parts.size)]

    guided = row.guided(parts, partial(load, logits), logits.shape[0], number, given)
    found[0] = row.choose(guided, partial(load, noise), number, top_k, top_p)
