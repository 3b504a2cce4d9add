"""What `experiments.aot` says about a compiled program: a dictionary for --json, a table to read.

Bytes are those of one device. The peak is that of the program that needs more, next to what lies on
the device while it runs: for drawing codes the weights that only the decoder reads, for decoding
pixels the other weights. The cache is freed before pixels are decoded.
"""

from collections.abc import Sequence

import jax

from experiments.aot.compiler import Program
from experiments.aot.program import Compiled, Workload
from experiments.aot.roofline import roofline
from varjax.engine.cost import device_bytes
from varjax.engine.memory import show_bytes
from varjax.parallel.sharding import ShardedPlan

TERA = 10**12

LEGEND = """\
peak         most bytes on the device at one time: weights, cache, temporaries, results and code;
             "codes" or "pixels": the program that decides. Not counted: what the runtime reserves.
in place     the donated cache is updated in place: no buffer and no copy of the pool's shape beside
             it, and no copy of another array of at least 1 % of its bytes.
promised     weights + pool + activations and logits as predicted without compiling.
FLOPs        products and convolutions, padding included; "kernels": counted from the plan, without.
roofline     a floor, not a prediction: max(FLOPs / peak bfloat16 rate, bytes / bandwidth), bytes =
             a layer's weights and tables once per scale, other weights once, the pool's tokens read
             by every scale and written once."""
GPU_LEGEND = """\
GPU          nothing is tuned without the chip, which may choose other kernels and temporaries. JAX
             takes three quarters of its memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."""


def peaks(compiled: Compiled) -> dict[str, int]:
    """Most bytes on the device while each program runs."""
    codes, pixels = compiled.codes, compiled.pixels
    return {
        "codes": codes.resident + pixels.code,
        "pixels": pixels.resident + codes.code,
    }


def describe(workload: Workload, compiled: Compiled, temporaries: int) -> dict:
    """JSON-able content of one result. temporaries: how many to list of each program."""
    found = peaks(compiled)
    decides = max(found, key=found.get)
    state, pool = compiled.state, compiled.state.kv_pool
    pool_bytes = sum(device_bytes(a) for a in (pool, state.kv_scale) if a is not None)
    held = sum(map(device_bytes, jax.tree.leaves(state)))
    parameters = sum(map(device_bytes, jax.tree.leaves(compiled.networks)))
    ceiling = roofline(workload, compiled)
    activations = _activations(workload, compiled.batch_size)
    promised = parameters + held + activations
    return {
        "status": "compiled",
        "batch_size": compiled.batch_size,
        "attention": workload.attention,
        "devices": workload.program.mesh.num_devices,
        "parameter_bytes": parameters,
        "kv_pool_bytes": pool_bytes,
        "bookkeeping_bytes": held - pool_bytes,
        "peak_bytes": found[decides],
        "peak_of": decides,
        "memory_bytes": compiled.chip.memory,
        "fits": found[decides] <= compiled.chip.memory,
        "promised_bytes": promised,
        "promised_activation_bytes": activations,
        "peak_over_promised": found[decides] / promised,
        "pool_aliased": compiled.codes.aliased >= held,
        "copies": compiled.codes.copies,
        "flops": ceiling.flops,
        "kernel_flops": ceiling.kernel_flops,
        "kernel_calls": dict(compiled.codes.cost.kernels),
        "loops_of_unknown_length": compiled.codes.cost.loops + compiled.pixels.cost.loops,
        "bytes_moved": ceiling.num_bytes,
        "roofline_s": ceiling.seconds,
        "roofline_bound": ceiling.bound,
        "roofline_images_per_s": ceiling.images_per_s,
        "compile_s": compiled.codes.compile_s + compiled.pixels.compile_s,
        "programs": {
            "codes": _program(compiled.codes, temporaries),
            "pixels": _program(compiled.pixels, temporaries),
        },
    }


def _activations(workload: Workload, batch_size: int) -> int:
    """Activations, logits and what layers hold of the text on one device, as predicted without
    compiling."""
    plan = ShardedPlan(workload.plan, workload.program.mesh).groups[0]
    need = workload.predict(plan, batch_size // workload.program.mesh.data)
    return need.activations + need.condition


def _program(program: Program, temporaries: int) -> dict:
    largest = [
        {"bytes": b.size, "shape": b.shape, "instruction": b.name, "source": b.source}
        for b in program.live[:temporaries]
    ]
    return {
        "argument_bytes": program.arguments,
        "output_bytes": program.outputs,
        "aliased_bytes": program.aliased,
        "temporary_bytes": program.temporaries,
        "code_bytes": program.code,
        "unread_weight_bytes": program.unread,
        "flops": program.cost.flops,
        "compile_s": program.compile_s,
        "live_temporary_bytes": sum(b.size for b in program.live),
        "largest_temporaries": largest,
    }


# --- the table ---


def text(results: Sequence[dict]) -> str:
    """The results of all targets: a table with one column for each, then their temporaries."""
    columns = [["", *(name for name, _ in _ROWS)]]
    columns += [[r["target"], *(_cell(row, r) for _, row in _ROWS)] for r in results]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
        if any(row[1:])
    ]
    notes = [note for r in results for note in _notes(r)]
    compiled = [r["platform"] for r in results if r["status"] == "compiled"]
    legend = ["", LEGEND] * bool(compiled) + [GPU_LEGEND] * ("gpu" in compiled)
    return "\n".join([*lines, *notes, *legend])


def _cell(row, result: dict) -> str:
    return str(row(result)) if result["status"] == "compiled" or row is _verdict else ""


def _verdict(r: dict) -> str:
    if r["status"] == "failed":
        return "FAILED"
    if r["status"] == "refused":
        return f"NO: asks for {show_bytes(r['needed_bytes'])}"
    return "yes" if r["fits"] else "NO"


def _temporary(program: str):
    return lambda r: show_bytes(r["programs"][program]["temporary_bytes"])


def _kernels(r: dict) -> str:
    return f"{r['kernel_flops'] / r['flops']:.1%}" if r["kernel_flops"] else ""


def _in_place(r: dict) -> str:
    if not r["pool_aliased"]:
        return "NO: not aliased"
    counts = [f"{len(copies)} of {name}" for name, copies in r["copies"].items()]
    return f"NO: copies: {', '.join(counts)}" if counts else "yes"


_ROWS = (
    ("batch", lambda r: r["batch_size"]),
    ("devices", lambda r: r["devices"] if r["devices"] > 1 else ""),
    ("attention", lambda r: r["attention"]),
    ("parameters", lambda r: show_bytes(r["parameter_bytes"])),
    ("KV pool", lambda r: show_bytes(r["kv_pool_bytes"])),
    ("bookkeeping", lambda r: show_bytes(r["bookkeeping_bytes"])),
    ("temporaries, codes", _temporary("codes")),
    ("temporaries, pixels", _temporary("pixels")),
    ("peak", lambda r: f"{show_bytes(r['peak_bytes'])} ({r['peak_of']})"),
    ("memory", lambda r: show_bytes(r["memory_bytes"])),
    ("fits", _verdict),
    ("in place", _in_place),
    ("promised", lambda r: show_bytes(r["promised_bytes"])),
    ("  peak / promised", lambda r: f"{r['peak_over_promised']:.3f}"),
    ("TFLOPs", lambda r: f"{r['flops'] / TERA:.4g}"),
    ("  kernels", _kernels),
    ("roofline seconds", lambda r: f"{r['roofline_s']:.3g} ({r['roofline_bound']})"),
    ("roofline images/s", lambda r: f"{r['roofline_images_per_s']:.3g}"),
    ("compile seconds", lambda r: f"{r['compile_s']:.0f}"),
)


def _notes(r: dict) -> list[str]:
    """What does not go into a table: messages, copies of the pool, temporaries by name."""
    if r["status"] != "compiled":
        return ["", f"{r['target']}: {r['error']}"]
    lines = []
    for name, program in r["programs"].items():
        if program["largest_temporaries"]:
            live = show_bytes(program["live_temporary_bytes"])
            lines += ["", f"{r['target']}, {name}: {live} of temporaries at the fullest moment"]
            lines += map(_temporary_line, program["largest_temporaries"])
    for name, copies in r["copies"].items():
        lines += [f"{r['target']}: copy of {name}: {copy}" for copy in copies]
    if r["loops_of_unknown_length"]:
        lines.append(f"{r['target']}: {r['loops_of_unknown_length']} loops were counted once")
    return lines


def _temporary_line(t: dict) -> str:
    shape = t["shape"].split("{")[0]
    return f"  {show_bytes(t['bytes']):>10s}  {shape:28s} {t['source'] or t['instruction']}"
