"""The least time that a chip could take for a batch: a floor that no run goes below.

    seconds = max(FLOPs / peak FLOP/s, bytes / bandwidth)

FLOPs: products and convolutions of both programs from the jaxpr, padding included, scan bodies as
often as they run. Products within kernels of ours are not in the jaxpr: those with weights count by
the kernels' own estimates, those of attention from the plan, because an estimate takes every table
for full. For every scale, layer and head, the scale's tokens meet those that the head holds and
their own; kernels skip tiles of padding.

Bytes: the slices that scans cut (weights, tables and conditioning of a layer, once per scale and
layer), every other weight once, the tokens that each scale finds in the pool read once and what it
adds written once. Activations are not counted (but for queries, keys and values where attention in
plain JAX takes a few rows at a time).

The peak is bfloat16's, also of float32 products; products of two numbers in 8 bits have that of
such numbers. All numbers are of one device; images/s are those of all devices.
"""

from functools import singledispatch

import jax
import numpy as np

from experiments.aot.program import Compilation
from pallas_kernels.chips import Chip
from varjax.core import stacked
from varjax.core.plan import CachePlan
from varjax.core.scale_plan import ScalePlan
from varjax.core.segments import Segment
from varjax.core.stages import TokenPlan
from varjax.core.step import DecidingStep, cache_step
from varjax.fast import schemes
from varjax.fast.schemes import SCHEMES
from varjax.generation.cost import device_bytes, tokens_read

OF_WEIGHTS = ("token_project", "token_gate", "token_add")  # kernels of `token_products`


def describe(case: Compilation) -> dict:
    """The floor of both programs, as content of a JSON file."""
    workload, codes, batch = case.workload, case.codes, case.batch_size
    plan, devices = workload.plan, workload.program.mesh.num_devices
    products = (n * k.flops for k, n in codes.cost.kernels.items() if k.name in OF_WEIGHTS)
    kernels = sum(products)
    if codes.cost.kernels:
        kernels += attention_flops(plan, case.spec.segments) * batch / devices
    flops = codes.cost.flops + case.pixels.cost.flops + kernels
    moved = codes.cost.scanned_bytes + _weights(case)
    if plan.pool_tokens:
        pool = plan.num_bytes(batch, workload.program.kv_dtype)
        moved += tokens_moved(plan) * pool / plan.pool_tokens / devices
    scheme, eight = SCHEMES.get(workload.model.weights_dtype), codes.cost.flops_8_bits
    # FLOPs of products in 8 bits, as if they ran at bfloat16's peak
    peak = (scheme and schemes.peak(scheme, case.chip)) or case.chip.bf16_flops
    equal = flops - eight + eight * case.chip.bf16_flops / peak
    return {
        "flops": flops,
        "kernel_flops": kernels,
        "bytes_moved": moved,
        **seconds(case.chip, equal, moved, batch),
    }


def seconds(chip: Chip, flops: float, moved: float, images: int) -> dict:
    """The floor of a device that computes so many FLOPs and moves so many bytes while all devices
    make so many images."""
    computing, moving = flops / chip.bf16_flops, moved / chip.bandwidth
    least = max(computing, moving)
    return {
        "floor_s": least,
        "floor_bound": "FLOPs" if computing > moving else "bytes",
        "floor_images_per_s": images / least,
    }


def attention_flops(plan: CachePlan, segments: tuple[Segment, ...]) -> float:
    """Least FLOPs of one image's attention: a scale's tokens against those that the pool holds for
    it and themselves, no padding and no empty slots; two products, and one more where the policy is
    shown sums of the attention weights."""
    g, products = plan.geometry, 0.0
    for segment in segments:
        step = cache_step(plan, segment.scales, None)
        passes = 2 + (isinstance(step, DecidingStep) and step.sums_attention)
        for s in segment.scales:
            tokens = g.schedule.tokens[s]
            held = float(plan.capacity[s].sum(dtype=np.float64))
            products += passes * tokens * (held + g.num_layers * g.num_heads * tokens)
    return 2 * g.head_dim * g.rows_per_image * products


@singledispatch
def tokens_moved(plan: ScalePlan) -> float:
    """Tokens of one row that are read from the pool and written to it, at least. What a scale
    writes is there more afterwards."""
    read = float(tokens_read(plan).sum())
    if plan.write_slots is not None:
        return read + float((plan.write_slots >= 0).sum())
    return read + float(np.maximum(np.diff(plan.capacity.astype(np.int64), axis=0), 0).sum())


@tokens_moved.register
def _(plan: TokenPlan) -> float:
    """The buffer of a stage grows token by token."""
    g, sequence = plan.geometry, plan.sequence
    written = (sequence.condition + sequence.steps) * g.num_layers * g.num_heads
    return float(tokens_read(plan).sum() + written)


def _weights(case: Compilation) -> float:
    """Bytes of the weights that no scan cuts: those that are arrays of their own in each layer as
    often as they are read, those outside the layers, or that all layers share, once."""
    transformer = case.networks["transformer"]
    leaves, blocks = jax.tree.leaves(case.networks), transformer.blocks
    apart = [b for b in jax.tree.leaves(blocks, is_leaf=stacked.is_one) if stacked.is_one(b)]
    separate = {id(array) for leaf in apart for array in leaf.parts}
    shared = jax.tree.leaves([getattr(blocks, name, None) for name in transformer.once])
    layers = set(map(id, jax.tree.leaves(blocks))) - set(map(id, shared))
    moved = 0
    for a, codes, pixels in zip(leaves, case.codes.times_read, case.pixels.times_read, strict=True):
        if id(a) in separate:
            moved += codes * device_bytes(a)
        elif id(a) not in layers and (codes or pixels):
            moved += device_bytes(a)
    return float(moved)
