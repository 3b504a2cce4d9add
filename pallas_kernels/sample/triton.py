"""Choosing tokens on NVIDIA GPUs with Pallas-Triton. See `api.sample`.

Tiling. A program holds a token's row in registers, padded with -inf to a power of two, which no
filter keeps, and runs the reference's filter on it there.

Traffic: every logit and every number of noise once, 4 (R + B) T V bytes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.sample.cost import estimate
from pallas_kernels.sample.reference import combined, filter_logits, first_largest

PER_WARP = 1024  # numbers of a row that a warp holds: 32 per thread, of each of two arrays


def sample(logits, noise, *, tau, strength, top_k: int, top_p: float, interpret: bool):
    """See `api.sample`."""
    images, tokens, vocabulary = noise.shape
    numbers = [jnp.reshape(a, 1).astype(jnp.float32) for a in (tau, strength) if a is not None]
    given = [a is not None for a in (tau, strength)]
    pairs = logits.reshape(-1, *noise.shape)  # conditional and unconditional rows, or one
    width = pl.next_power_of_2(vocabulary)
    return pl.pallas_call(
        partial(_kernel, given, top_k, top_p, width),
        grid=(tokens, images),
        in_specs=[
            *(pl.BlockSpec((1,), lambda t, b: (0,)) for _ in numbers),
            pl.BlockSpec((len(pairs), None, None, vocabulary), lambda t, b: (0, b, t, 0)),
            pl.BlockSpec((None, None, vocabulary), lambda t, b: (b, t, 0)),
        ],
        out_specs=pl.BlockSpec((None, 1), lambda t, b: (b, t)),
        out_shape=jax.ShapeDtypeStruct((images, tokens), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=max(1, width // PER_WARP), num_stages=1),
        cost_estimate=estimate(logits, noise, top_k, top_p),
        interpret=interpret,
        name="sample",
    )(*numbers, pairs, noise)


def _kernel(given, top_k: int, top_p: float, width: int, *refs):
    *numbers, logits, noise, found = refs
    numbers = iter(numbers)
    tau, strength = (next(numbers)[0] if there else None for there in given)
    lane = jnp.arange(width, dtype=jnp.int32)
    inside = lane < noise.shape[0]

    def row(ref, *index: int):
        return plgpu.load(ref.at[*index, lane], mask=inside, other=0)

    rows = [row(logits, i) for i in range(logits.shape[0])]
    padded = jnp.where(inside, combined(rows, tau, strength), -jnp.inf)
    filtered = filter_logits(padded, top_k, top_p)
    found[...] = first_largest(filtered + row(noise))
