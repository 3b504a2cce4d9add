"""Choosing tokens on TPU (Mosaic). See `api.sample`.

Tiling. A program holds the rows of some tokens in vector memory, about `ELEMENTS` numbers together,
and runs the reference's filter on them there, whose two searches pass over them 64 times. Arrays
are not padded: the compiler masks the lanes that a vocabulary does not fill, and what the last
program has beyond the tokens is dropped.

HBM traffic. Every logit and every number of noise moves once, 4 (R + B) T V bytes. A token takes
128 lanes when it is stored.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import estimates
from pallas_kernels.implementations import require
from pallas_kernels.sample.reference import combined, filter_logits, first_largest
from pallas_kernels.shared.tpu_operands import LANES, rounded

ROWS = 8  # of a vector register
ELEMENTS = 2**17  # numbers per program and array, which fill 128 registers
LARGEST = 2**16  # vocabulary, 8 rows of which take 12 of the 16 MiB of vector memory


def sample(logits, noise, *, tau, strength, top_k: int, top_p: float, interpret: bool):
    """See `api.sample`."""
    images, tokens, vocabulary = noise.shape
    takes = f"choosing on TPU takes vocabularies of up to {LARGEST} tokens, not {vocabulary}"
    require(vocabulary <= LARGEST, takes)
    shape = images, tokens
    if tokens == 1:  # else each group of 8 rows in a register would hold one
        images, tokens = 1, images
        noise = noise.reshape(images, tokens, vocabulary)
    given = jax.tree.map(lambda a: jnp.reshape(a, 1).astype(jnp.float32), (tau, strength))
    pairs = logits.reshape(-1, *noise.shape)  # conditional and unconditional rows, or one
    # tokens of one image, or several images with all tokens
    fits = max(ROWS, ELEMENTS // rounded(vocabulary, LANES) // ROWS * ROWS)
    block = (1, fits) if tokens >= fits else (min(images, fits // rounded(tokens, ROWS)), tokens)
    rows = (*block, vocabulary)
    # large rows are not fetched while others are at work: vector memory has no room for both
    ahead = pl.Buffered(1) if ROWS * vocabulary > ELEMENTS else None
    found = pl.pallas_call(
        partial(_kernel, top_k, top_p),
        grid=tuple(map(pl.cdiv, (images, tokens), block)),
        in_specs=[
            jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.SMEM), given),
            pl.BlockSpec((len(pairs), *rows), lambda b, t: (0, b, t, 0), pipeline_mode=ahead),
            pl.BlockSpec(rows, lambda b, t: (b, t, 0), pipeline_mode=ahead),
        ],
        out_specs=pl.BlockSpec((*block, 1), lambda b, t: (b, t, 0)),
        out_shape=jax.ShapeDtypeStruct((images, tokens, 1), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=estimates.sample(pairs, noise, top_k, top_p),
        interpret=interpret,
        name="sample",
    )(given, pairs, noise)
    return found.reshape(shape)


def _kernel(top_k: int, top_p: float, given, logits, noise, found):
    tau, strength = jax.tree.map(lambda ref: ref[0], given)
    # conditional rows, and unconditional ones where there is guidance
    rows = (logits[i] for i in range(logits.shape[0]))
    filtered = filter_logits(combined(rows, tau, strength), top_k, top_p)
    found[...] = first_largest(filtered + noise[...])
