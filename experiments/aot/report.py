"""The result of compiling the programs that draw, as content of a JSON file.

Bytes are those of one device. The peak is that of the program that needs more. It includes what
lies on the device beside the program: weights that only the decoder reads while codes are drawn,
the other weights while pixels are decoded. The cache is freed before pixels are decoded.
"""

from collections import Counter

import jax

from experiments.aot import floor
from experiments.aot.program import Compilation, Program
from varjax.engine.cost import device_bytes

LISTED = 8  # temporaries, and operations that start kernels


def describe(case: Compilation) -> dict:
    """The result for a batch."""
    workload, codes, pixels, memory = case.workload, case.codes, case.pixels, case.chip.memory
    # the code of both programs stays on the device
    peaks = {
        "codes": codes.resident + pixels.memory.generated_code_size_in_bytes,
        "pixels": pixels.resident + codes.memory.generated_code_size_in_bytes,
    }
    decides = max(peaks, key=peaks.get)
    peak, state = peaks[decides], case.state
    pool = num_bytes(workload.plan.kv_arrays(state))
    held, parameters = num_bytes(state), num_bytes(case.networks)
    # on one device: activations, logits and what layers keep of the text
    mesh = workload.program.mesh
    need = workload.predict(case.batch_size // mesh.data, case.chip.platform, case.layers)
    activations = need.activations + need.condition
    promised = parameters + held + activations
    return {
        "status": "compiled",
        "batch_size": case.batch_size,
        "attention": case.spec.options.attention or "auto",
        "segments": [[s.start, s.stop, s.length] for s in case.spec.segments],
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
        "aliased": codes.memory.alias_size_in_bytes >= held,
        "copies": codes.copies,
        "loops_of_unknown_length": codes.cost.loops + pixels.cost.loops,
        **floor.describe(case),
        "compile_s": codes.compile_s + pixels.compile_s,
        "programs": {"codes": describe_program(codes), "pixels": describe_program(pixels)},
    }


def num_bytes(tree: object) -> int:
    """Bytes of all arrays of a tree on one device."""
    return sum(map(device_bytes, jax.tree.leaves(tree)))


def describe_program(program: Program) -> dict:
    """Bytes, exchanges, kernels and largest temporaries of a program."""
    stats, sources = program.memory, Counter()
    for k in program.kernels:
        if not k.ours:
            sources[k.source] += k.times
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "aliased_bytes": stats.alias_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
        "unread_weight_bytes": program.unread,
        "flops": program.cost.flops,
        "compile_s": program.compile_s,
        "collectives": program.exchanged,
        "kernels": sum(k.times for k in program.kernels),
        "kernels_by_operation": dict(sources.most_common(LISTED)),
        "kernels_of_ours": _ours(program),
        "copied_weight_bytes": sum(k.times * k.copied for k in program.kernels),
        "launches": program.launches and program.launches._asdict(),
        "live_temporary_bytes": sum(b.size for b in program.live),
        "largest_temporaries": [
            {"bytes": b.size, "shape": b.shape, "instruction": b.name, "source": b.source}
            for b in program.live[:LISTED]
        ],
    }


def _ours(program: Program) -> dict[str, dict]:
    """{kernel of ours: its calls, and FLOPs and bytes of all of them as it estimates them, for
    full tables}."""
    sums: dict[str, Counter] = {}
    for work, calls in program.cost.kernels.items():
        each = {"calls": calls, "flops": calls * work.flops, "bytes": calls * work.bytes}
        sums.setdefault(work.name, Counter()).update(each)
    found = {}
    for name, total in sums.items():
        # without calls that the compiler left out because they equal others; a kernel that the text
        # does not name keeps all
        started = sum(k.times for k in program.kernels if k.ours and name in k.source.split("/"))
        share = min(1.0, started / total["calls"]) if started else 1.0
        found[name] = {key: share * number for key, number in total.items()}
    return found
