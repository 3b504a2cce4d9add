"""The least time that a chip could take for a batch: a floor, not a prediction.

    seconds = max(FLOPs / peak FLOP/s of bfloat16, bytes / bandwidth)

FLOPs: products and convolutions of both programs from the jaxpr, padding included, scan bodies as
often as they run. What Pallas kernels compute is not in the jaxpr and is added from the plan: for
every scale, layer and head, the scale's tokens against those that the head holds and their own,
without padding, because kernels skip tiles of it. Bytes: what scans cut into slices (weights,
tables and conditioning of a layer, once per scale and layer), every other weight once, the tokens
that each scale finds in the pool read once and what it adds written once. Activations are not
counted, and float32 products as if they ran at the rate of bfloat16.

All numbers are of one device; images/s are those of all devices.
"""

import jax
import numpy as np

from experiments.aot.program import Compilation
from varjax.cache.plan import CachePlan
from varjax.cache.step import DecidingStep, cache_step
from varjax.engine.cost import device_bytes
from varjax.engine.segments import Segment


def roofline(case: Compilation) -> dict:
    """Of a batch on one device, for the report. kernel_flops: the part counted from the plan."""
    workload, codes, batch = case.workload, case.codes, case.batch_size
    plan, devices = workload.plan, workload.program.mesh.num_devices
    kernels = 0.0
    if codes.cost.kernels:
        kernels = attention_flops(plan, workload.segments) * batch / devices
    flops = codes.cost.flops + case.pixels.cost.flops + kernels
    moved = codes.cost.scanned_bytes + _weights_outside_layers(case)
    moved += pool_traffic(plan, batch, workload.program.kv_dtype) / devices
    computing, moving = flops / case.chip.bf16_flops, moved / case.chip.bandwidth
    seconds = max(computing, moving)
    return {
        "flops": flops,
        "kernel_flops": kernels,
        "bytes_moved": moved,
        "roofline_s": seconds,
        "roofline_bound": "FLOPs" if computing > moving else "bytes",
        "roofline_images_per_s": batch / seconds,
    }


def attention_flops(plan: CachePlan, segments: tuple[Segment, ...]) -> float:
    """Least FLOPs of one image's attention: a scale's tokens against those that the pool holds for
    it and themselves, no padding and no empty slots; two products, and one more where the policy is
    shown sums of the attention weights."""
    g, products = plan.geometry, 0.0
    for segment in segments:
        step = cache_step(plan, segment, None)
        passes = 2 + (isinstance(step, DecidingStep) and step.sums_attention)
        for s in segment.scales:
            tokens = g.schedule.tokens[s]
            held = float(plan.capacity[s].sum(dtype=np.float64))
            products += passes * tokens * (held + g.num_layers * g.num_heads * tokens)
    return 2 * g.head_dim * g.rows_per_image * products


def pool_traffic(plan: CachePlan, batch_size: int, kv_dtype: str) -> float:
    """Bytes of K and V that a batch reads from the pool and writes to it, at least: every scale
    reads what its heads hold when it starts, and writes what is there more afterwards."""
    if not plan.pool_tokens:
        return 0.0
    per_token = plan.num_bytes(batch_size, kv_dtype) / plan.pool_tokens
    read = float(plan.capacity.sum(dtype=np.float64))
    if plan.write_slots is not None:
        written = float((plan.write_slots >= 0).sum())
    else:
        written = float(np.maximum(np.diff(plan.capacity.astype(np.int64), axis=0), 0).sum())
    return (read + written) * per_token


def _weights_outside_layers(case: Compilation) -> float:
    """Bytes of the weights that a program reads, the stacked layers apart."""
    layers = {id(leaf) for leaf in jax.tree.leaves(case.networks["transformer"].blocks)}
    leaves = jax.tree.leaves(case.networks)
    read = zip(leaves, case.codes.reads, case.pixels.reads, strict=True)
    return float(sum(device_bytes(a) for a, *by in read if any(by) and id(a) not in layers))
