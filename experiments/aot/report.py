"""The report on a compiled program: a dictionary for --json, and a table to read.

Bytes are those of one device. The peak is that of the program that needs more. It includes what
lies on the device beside the program: weights that only the decoder reads while codes are drawn,
the other weights while pixels are decoded. The cache is freed before pixels are decoded.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import singledispatch

import jax
import numpy as np

from experiments.aot import collectives, modelled_report, per_token
from experiments.aot.buffers import total_bytes
from experiments.aot.listing import collective_lines, exchanged, table, temporary_lines
from experiments.aot.program import Compilation, Program
from varjax.cache.plan import CachePlan
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.stages import TokenPlan
from varjax.cache.step import DecidingStep, cache_step
from varjax.engine.cost import device_bytes
from varjax.engine.memory import show_bytes
from varjax.engine.segments import Segment
from varjax.nn import schemes, stacked
from varjax.nn.schemes import SCHEMES

TERA = 10**12

LEGEND = """\
peak         most bytes on the device at one time: weights, cache, temporaries, results and code;
             "codes" or "pixels": the program that decides. Not counted: what the runtime reserves.
in place     the donated cache is updated in place: no buffer and no copy of the pool's shape beside
             it, and no copy of another array of at least 1 % of its bytes.
promised     weights + pool + activations and logits as predicted without compiling.
FLOPs        products and convolutions, padding included; "kernels": counted from the plan, without.
exchanged    bytes that a device sends to others in one run, around a ring; below the table the
             arrays by kind of exchange.
roofline     a floor, not a prediction: max(FLOPs / peak rate, bytes / bandwidth), bytes =
             a layer's weights and tables once per scale, other weights once, the pool's tokens read
             by every scale and written once."""
GPU_LEGEND = """\
GPU          nothing is tuned without the chip, which may choose other kernels and temporaries. JAX
             takes three quarters of its memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."""


def describe(case: Compilation, temporaries: int) -> dict:
    """One result, as content of a JSON file. temporaries: how many to list of each program."""
    workload, codes, pixels, memory = case.workload, case.codes, case.pixels, case.chip.memory
    # the code of both programs stays on the device
    peaks = {
        "codes": codes.resident + pixels.memory.generated_code_size_in_bytes,
        "pixels": pixels.resident + codes.memory.generated_code_size_in_bytes,
    }
    decides = max(peaks, key=peaks.get)
    peak, state = peaks[decides], case.state
    pool = _num_bytes(workload.plan.kv_arrays(state))
    held, parameters = _num_bytes(state), _num_bytes(case.networks)
    # on one device: activations, logits and what layers keep of the text
    mesh = workload.program.mesh
    need = workload.predict(workload.plan, case.batch_size // mesh.data)
    activations = need.activations + need.condition
    promised = parameters + held + activations
    return {
        "status": "compiled",
        "batch_size": case.batch_size,
        "attention": case.spec.attention or "auto",
        "segments": [[s.start, s.stop, s.length] for s in case.drawing.segments],
        "layers": case.layers,
        "decode_dtype": workload.program.decoding.dtype,
        "devices": mesh.num_devices,
        "parameter_bytes": parameters,
        "kv_pool_bytes": pool,
        "bookkeeping_bytes": held - pool,
        "peak_bytes": peak,
        "peak_of": decides,
        "memory_bytes": memory,
        "fits": peak <= memory,
        "promised_bytes": promised,
        "promised_activation_bytes": activations,
        "peak_over_promised": peak / promised,
        "pool_aliased": codes.memory.alias_size_in_bytes >= held,
        "copies": codes.copies,
        "kernel_calls": dict(codes.cost.kernel_calls),
        "loops_of_unknown_length": codes.cost.loops + pixels.cost.loops,
        **roofline(case),
        "per_token": per_token.describe(case),
        "compile_s": codes.compile_s + pixels.compile_s,
        "programs": {
            "codes": _program(codes, temporaries),
            "pixels": _program(pixels, temporaries),
        },
    }


def _num_bytes(tree: object) -> int:
    """Bytes of all arrays of a tree on one device."""
    return sum(map(device_bytes, jax.tree.leaves(tree)))


def _program(program: Program, temporaries: int) -> dict:
    stats = program.memory
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "aliased_bytes": stats.alias_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
        "unread_weight_bytes": program.unread,
        "flops": program.cost.flops,
        "collectives": collectives.describe(program.exchanged),
        "compile_s": program.compile_s,
        "modelled": modelled_report.describe(program.modelled),
        "launches": program.launches and asdict(program.launches),
        "live_temporary_bytes": total_bytes(program.live),
        "largest_temporaries": [
            {"bytes": b.size, "shape": b.shape, "instruction": b.name, "source": b.source}
            for b in program.live[:temporaries]
        ],
    }


# --- roofline ---


def roofline(case: Compilation) -> dict:
    """The least time that a chip could take for a batch: a floor, not a prediction.

        seconds = max(FLOPs / peak FLOP/s, bytes / bandwidth)

    FLOPs: products and convolutions of both programs from the jaxpr, padding included, scan bodies
    as often as they run. What Pallas kernels compute is not in the jaxpr and is added from the
    plan: for every scale, layer and head, the scale's tokens against those that the head holds and
    their own, without padding, because kernels skip tiles of it. Bytes: what scans cut into slices
    (weights, tables and conditioning of a layer, once per scale and layer), every other weight
    once, the tokens that each scale finds in the pool read once and what it adds written once.
    Activations are not counted (but for queries, keys and values where attention in plain JAX takes
    a few rows at a time). The peak is bfloat16's, also of float32 products; products of two numbers
    in 8 bits have that of such numbers.

    All numbers are of one device; images/s are those of all devices.
    """
    workload, codes, batch = case.workload, case.codes, case.batch_size
    plan, devices = workload.plan, workload.program.mesh.num_devices
    kernels = 0.0
    if codes.cost.kernels:
        kernels = attention_flops(plan, case.drawing.segments) * batch / devices
    flops = codes.cost.flops + case.pixels.cost.flops + kernels
    moved = codes.cost.scanned_bytes + _unrolled_weights(case) + _weights_outside_layers(case)
    moved += pool_traffic(plan, batch, workload.program.kv_dtype) / devices
    eight = codes.cost.flops_8_bits
    computing = (flops - eight) / case.chip.bf16_flops + eight / _peak(case)
    moving = moved / case.chip.bandwidth
    seconds = max(computing, moving)
    return {
        "flops": flops,
        "kernel_flops": kernels,
        "bytes_moved": moved,
        "roofline_s": seconds,
        "roofline_bound": "FLOPs" if computing > moving else "bytes",
        "roofline_images_per_s": batch / seconds,
    }


def _peak(case: Compilation) -> float:
    """Peak rate of products with the transformer's matrices."""
    scheme = SCHEMES.get(case.workload.model.weights_dtype)
    return (scheme and schemes.peak(scheme, case.chip)) or case.chip.bf16_flops


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


def pool_traffic(plan: CachePlan, batch_size: int, kv_dtype: str) -> float:
    """Bytes of K and V that a batch reads from the pool and writes to it, at least."""
    if not plan.pool_tokens:
        return 0.0
    return tokens_moved(plan) * plan.num_bytes(batch_size, kv_dtype) / plan.pool_tokens


@singledispatch
def tokens_moved(plan: CachePlan) -> float:
    """Tokens of one row that are read from the pool and written to it, at least."""
    raise NotImplementedError(type(plan))


@tokens_moved.register
def _(plan: ScalePlan) -> float:
    """Every scale reads what its heads hold when it starts, and writes what is there more
    afterwards."""
    read = float(plan.capacity.sum(dtype=np.float64))
    if plan.write_slots is not None:
        written = float((plan.write_slots >= 0).sum())
    else:
        written = float(np.maximum(np.diff(plan.capacity.astype(np.int64), axis=0), 0).sum())
    return read + written


@tokens_moved.register
def _(plan: TokenPlan) -> float:
    """Every image token reads what is held when it is drawn, itself included. The buffer of a stage
    grows token by token."""
    sequence, period, slots = plan.sequence, plan.allocation.period, plan.allocation.slots
    held = plan.allocation.held(plan.geometry)[1:]
    number = np.arange(sequence.steps)
    before = held[number // period] + (number % period + 1)[:, None]
    read = np.minimum(before, slots) + sequence.condition
    written = (sequence.condition + sequence.steps) * len(slots)
    return float((read.sum(dtype=np.float64) + written) * plan.geometry.num_heads)


def _unrolled_weights(case: Compilation) -> float:
    """Bytes of weights that are arrays of their own in each layer, as often as they are read."""
    separate = jax.tree.leaves(case.networks["transformer"].blocks, is_leaf=stacked.is_one)
    parts = {id(a) for leaf in separate if stacked.is_one(leaf) for a in leaf.parts}
    read = zip(jax.tree.leaves(case.networks), case.codes.times_read, strict=True)
    return float(sum(n * device_bytes(a) for a, n in read if id(a) in parts))


def _weights_outside_layers(case: Compilation) -> float:
    """Bytes of the weights that a program reads once. They include weights that all layers share
    and none of the layers' own."""
    transformer = case.networks["transformer"]
    once = (getattr(transformer.blocks, name, None) for name in transformer.once)
    kept = {id(leaf) for part in once for leaf in jax.tree.leaves(part)}
    layers = {id(leaf) for leaf in jax.tree.leaves(transformer.blocks)} - kept
    leaves = jax.tree.leaves(case.networks)
    read = zip(leaves, case.codes.times_read, case.pixels.times_read, strict=True)
    return float(sum(device_bytes(a) for a, *by in read if any(by) and id(a) not in layers))


# --- the table ---


def text(results: Sequence[dict]) -> str:
    """The results of all targets: a table with a column for each, then their temporaries."""
    lines = table(_ROWS, results)
    notes = [note for r in results for note in _notes(r)]
    compiled = [r["platform"] for r in results if r["status"] == "compiled"]
    legend = ["", LEGEND, modelled_report.LEGEND] * bool(compiled)
    legend += [per_token.LEGEND] * any(r.get("per_token") for r in results)
    legend += [GPU_LEGEND] * ("gpu" in compiled)
    return "\n".join([*lines, *notes, *legend])


def _bytes(key: str, program: str | None = None):
    return lambda r: show_bytes((r["programs"][program] if program else r)[key])


def _in_place(r: dict) -> str:
    if not r["pool_aliased"]:
        return "NO: not aliased"
    counts = [f"{len(copies)} of {name}" for name, copies in r["copies"].items()]
    return f"NO: copies: {', '.join(counts)}" if counts else "yes"


def _started(kind: str):
    """Starts of a kind in the program that draws codes, where the compiler says."""

    def found(r: dict) -> str:
        starts = r["programs"]["codes"]["launches"]
        return f"{starts[kind]:.0f}" if starts else ""

    return found


_ROWS = (
    ("batch", lambda r: r["batch_size"]),
    ("devices", lambda r: r["devices"] if r["devices"] > 1 else ""),
    ("attention", lambda r: r["attention"]),
    ("segments, layers", lambda r: f"{len(r['segments'])}, {r['layers']}"),
    ("pixels in", lambda r: r["decode_dtype"]),
    ("parameters", _bytes("parameter_bytes")),
    ("KV pool", _bytes("kv_pool_bytes")),
    ("bookkeeping", _bytes("bookkeeping_bytes")),
    ("temporaries, codes", _bytes("temporary_bytes", "codes")),
    ("temporaries, pixels", _bytes("temporary_bytes", "pixels")),
    ("peak", lambda r: f"{show_bytes(r['peak_bytes'])} ({r['peak_of']})"),
    ("memory", _bytes("memory_bytes")),
    ("fits", lambda r: "yes" if r["fits"] else "NO"),
    ("in place", _in_place),
    ("promised", _bytes("promised_bytes")),
    ("  peak / promised", lambda r: f"{r['peak_over_promised']:.3f}"),
    ("TFLOPs", lambda r: f"{r['flops'] / TERA:.4g}"),
    ("  kernels", lambda r: f"{r['kernel_flops'] / r['flops']:.1%}" if r["kernel_flops"] else ""),
    ("roofline seconds", lambda r: f"{r['roofline_s']:.3g} ({r['roofline_bound']})"),
    ("roofline images/s", lambda r: f"{r['roofline_images_per_s']:.3g}"),
    *modelled_report.ROWS,
    ("command buffers, codes", _started("buffers")),
    ("  kernels outside them", _started("outside")),
    *per_token.ROWS,
    ("exchanged, codes", lambda r: exchanged(r["programs"]["codes"])),
    ("compile seconds", lambda r: f"{r['compile_s']:.0f}"),
)


def _notes(r: dict) -> list[str]:
    """Lines below the table: messages, copies of the pool, temporaries by name."""
    if r["status"] != "compiled":
        return ["", f"{r['target']}: {r['error']}"]
    lines = []
    for name, program in r["programs"].items():
        lines += temporary_lines(r["target"], name, program)
        lines += modelled_report.notes(r["target"], name, program["modelled"])
        lines += collective_lines(r["target"], name, program)
    for name, copies in r["copies"].items():
        lines += [f"{r['target']}: copy of {name}: {copy}" for copy in copies]
    if r["loops_of_unknown_length"]:
        lines.append(f"{r['target']}: {r['loops_of_unknown_length']} loops were counted once")
    return lines
