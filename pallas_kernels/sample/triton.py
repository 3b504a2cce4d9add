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

from pallas_kernels.sample import reference, row
from pallas_kernels.sample.operands import estimate, numbers, scalars
from pallas_kernels.sample.row import Parts

MOST = 16384
PER_WARP = 1024  # numbers: 32 per thread from each of two arrays


def sample(logits, noise, *, tau, strength, top_k: int, top_p: float, interpret: bool):
    """See `api.sample`."""
    images, tokens, vocabulary = noise.shape
    parts = Parts.of(vocabulary, MOST)
    if not parts.held and not reference.is_filtered(vocabulary, top_k, top_p):
        # nothing is read many times, and XLA reads logits once, with the noise as it is made
        how = {"tau": tau, "strength": strength, "top_k": top_k, "top_p": top_p}
        return reference.sample(logits, noise, **how)
    if not parts.held:  # parts are read many times: guidance would double each read
        logits, tau, strength = reference.guided(logits, tau, strength), None, None
    given = numbers(tau, strength)
    pairs = logits.reshape(-1, *noise.shape)  # conditional and unconditional rows, or one
    warps = max(1, pl.cdiv(min(MOST, parts.count * parts.size), PER_WARP))
    return pl.pallas_call(
        partial(_kernel, parts, top_k, top_p),
        grid=(tokens, images),
        in_specs=[
            jax.tree.map(lambda _: pl.BlockSpec((1,), lambda t, b: (0,)), given),
            pl.BlockSpec((len(pairs), None, None, vocabulary), lambda t, b: (0, b, t, 0)),
            pl.BlockSpec((None, None, vocabulary), lambda t, b: (b, t, 0)),
        ],
        out_specs=pl.BlockSpec((None, 1), lambda t, b: (b, t)),
        out_shape=jax.ShapeDtypeStruct((images, tokens), jnp.int32),
        # one stage: what a part is computed from comes from caches, nothing is loaded ahead
        compiler_params=plgpu.CompilerParams(num_warps=pl.next_power_of_2(warps), num_stages=1),
        cost_estimate=estimate(logits, noise, top_k, top_p),
        interpret=interpret,
        name="sample",
    )(given, pairs, noise)


def _kernel(parts: Parts, top_k: int, top_p: float, given, logits, noise, found):
    def number(start):
        return start + jnp.arange(parts.size, dtype=jnp.int32)

    def load(i: int, start):
        return logits[i, pl.ds(start, parts.size)]

    def load_noise(start):
        return noise[pl.ds(start, parts.size)]

    guided = row.guided(parts, load, logits.shape[0], number, *scalars(given))
    found[0] = row.choose(guided, load_noise, number, top_k, top_p)
