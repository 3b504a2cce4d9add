"""Compile a whole generation program for chips that are not here: does it fit, and what is in it?

    python -m experiments.aot --model=var-d30 --batch_size=8 --target=tpu-v5e,h200
    python -m experiments.aot --model=var-d30 --policy=streaming --budget=0.1 --target=a100 \\
        --largest_batch
    python -m experiments.aot --model=var-d36 --mesh=data=4,model=2 --batch_size=32 --target=v5p

Compiles exactly what `experiments.run` would run there, with the real compiler of the chip, and no
weights. Prints the bytes of parameters, cache and temporaries, the peak, whether it fits, whether
the cache is updated in place, FLOPs, a roofline, and the largest temporaries with the operation
that makes them. Needs `libtpu` for TPUs and JAX's CUDA plugin for GPUs, not the chips; see
docs/aot.md.

Every target is compiled in a process of its own. Exit status 1: a target failed, the others are
printed. A program that does not fit is a result, not a failure.
"""

import json
import sys

import jax
from varjax.engine.generator import MATMUL_PRECISIONS

from experiments.aot import report, worker
from experiments.aot.program import Request
from experiments.flags.generation import SamplingFlags
from experiments.flags.model import ModelFlags
from experiments.flags.policy import PolicyFlags
from experiments.prompts import condition
from pallas_kernels import chips, implementations
from pallas_kernels.chips import Chip
from varjax import api
from varjax.cache.planner import plan_cache
from varjax.cli import command_line
from varjax.engine.segments import plan_segments
from varjax.errors import UserError
from varjax.parallel import sharding
from varjax.parallel.mesh import MeshSpec
from varjax.storage.atomic import check_new_file, new_file

FLAGS = command_line.CommandFlags()
MODEL = ModelFlags(FLAGS, published="Published name")
TARGET = FLAGS.string(
    "target",
    "tpu-v5e,tpu-v6e,a100,h200",
    f"Chips, separated by commas: {', '.join(chips.CHIPS)}.",
)
POLICY = PolicyFlags(FLAGS)
BATCH_SIZE = FLAGS.integer(
    "batch_size", 8, "Images per program call.", lower_bound=1, upper_bound=10**6
)
LARGEST_BATCH = FLAGS.boolean(
    "largest_batch", False, "Find the largest batch that fits; --batch_size does not matter."
)
DTYPE = FLAGS.enum("dtype", "bfloat16", ["bfloat16", "float32"], "Type of weights and cache.")
KV_DTYPE = FLAGS.enum(
    "kv_dtype", None, list(api.KV_DTYPES), "Type of stored keys and values; default: --dtype"
)
PRECISION = FLAGS.enum(
    "matmul_precision",
    "default",
    list(MATMUL_PRECISIONS),
    "Precision of float32 products.",
)
SEGMENTS = FLAGS.string(
    "segments", "auto", "How many segments the scale loop is cut into: auto or a number."
)
ATTENTION = FLAGS.enum(
    "attention",
    "auto",
    ["auto", "reference", *implementations.PLATFORMS],
    "Attention implementation; auto takes the kernel for the target's platform.",
)
MESH = FLAGS.string(
    "mesh", None, "Devices: data=8 splits the batch, data=4,model=2 heads and weights as well."
)
SAMPLING = SamplingFlags(FLAGS)
TEXT_TOKENS = FLAGS.integer(
    "text_tokens",
    None,
    "Padded length of the texts of a text-to-image model; default: the most it takes.",
    lower_bound=1,
)
DECODE_BATCH = FLAGS.integer(
    "decode_batch",
    None,
    "Images decoded to pixels at a time; default: what takes 2 GiB.",
    lower_bound=1,
)
TEMPORARIES = FLAGS.integer(
    "temporaries", 8, "How many temporaries to list of each program.", lower_bound=0
)
JSON = FLAGS.string("json", None, "Also write the results to this file.")
OVERWRITE = FLAGS.boolean("overwrite", False, "Replace the --json file if it exists.")
WORKER = FLAGS.string("worker", None, "Internal: compile the one target here, result into a file.")


def targets() -> list[Chip]:
    """The chips of --target, each once, whose compilers are here."""
    found = {}
    for name in TARGET.value.split(","):
        try:
            chip = chips.get_chip(name.strip())
        except ValueError as error:
            raise UserError(f"--target={name}: {error}") from None
        found[chip.name] = chip
    missing = {}
    for name in found:
        if why := chips.why_unavailable(name):
            missing.setdefault(why, []).append(name)
    if missing:
        each = "; ".join(f"{', '.join(names)}: {why}" for why, names in missing.items())
        raise UserError(f"cannot compile for {each}")
    return list(found.values())


def attention_for(chip: Chip) -> str:
    """The implementation of --attention on a chip."""
    name = ATTENTION.value
    if name == "auto":
        return implementations.preferred(chip.platform)
    wanted = implementations.PLATFORMS.get(name, chip.platform)
    if wanted != chip.platform:
        raise UserError(
            f"--attention={name} runs on a {wanted.upper()}, {chip.name} is a "
            f"{chip.platform.upper()}: choose auto or reference, or other targets"
        )
    return name


def resolve(wanted: list[Chip]) -> dict[str, Request]:
    """What to compile for each target. All flags are checked, nothing is compiled."""
    model = MODEL.resolve()
    policy = POLICY.resolve()
    mesh = MeshSpec.parse(MESH.value)
    for chip in wanted:
        mesh.check(
            batch_size=mesh.data if LARGEST_BATCH.value else BATCH_SIZE.value,
            num_heads=model.geometry.num_heads,
            available=chip.most_devices,
            where=chip.name,
        )
    sampling = SAMPLING.sampling(model)
    calibration = POLICY.calibration(policy, model.geometry, model, sampling)
    segments = plan_segments(model.geometry.schedule, SEGMENTS.value)
    attention = {chip.name: attention_for(chip) for chip in wanted}
    plan = plan_cache(model.geometry, policy, calibration)
    if mesh.num_devices > 1:
        sharding.check_plan(plan, mesh)
    return {
        chip.name: Request(
            model=model,
            plan=plan,
            sampling=sampling,
            dtype=DTYPE.value,
            kv_dtype=KV_DTYPE.value or DTYPE.value,
            segments=segments,
            attention=attention[chip.name],
            or_reference=ATTENTION.value == "auto",
            precision=PRECISION.value,
            mesh=mesh,
            text_tokens=condition.check_text_tokens(TEXT_TOKENS.value, model),
            decode_batch=DECODE_BATCH.value,
            remarks=tuple(POLICY.remarks(plan, calibration)),
        )
        for chip in wanted
    }


def title(request: Request) -> str:
    """What is compiled, in one line, and remarks on the plan."""
    plan, mesh = request.plan, request.mesh
    parts = [
        request.model.name,
        f"policy {POLICY.name}",
        f"budget {plan.budget:g} (pool {plan.fraction:.2%} of full)",
        request.dtype,
        *([f"cache {request.kv_dtype}"] if request.kv_dtype != request.dtype else []),
        f"{len(request.segments)} segments",
        *([f"mesh {mesh}, bytes per device"] if mesh.num_devices > 1 else []),
    ]
    return "\n".join([", ".join(parts), *request.remarks])


def main(argv) -> int:
    jax.config.update("jax_platforms", "cpu")  # planning needs no accelerator, and takes none
    if JSON.value and not WORKER.value:
        check_new_file(JSON.value, overwrite=OVERWRITE.value, flag="--json")
    wanted = targets()
    requests = resolve(wanted)
    if WORKER.value:
        (chip,) = wanted
        batch = None if LARGEST_BATCH.value else BATCH_SIZE.value
        worker.work(requests[chip.name], chip, batch, TEMPORARIES.value, WORKER.value)
        return 0
    results = []
    for chip in wanted:
        result = worker.start(chip.name, sys.argv[1:])
        results.append({"target": chip.name, "platform": chip.platform, **result})
    print(title(requests[wanted[0].name]), end="\n\n")
    print(report.text(results))
    if JSON.value:
        content = {
            "flags": FLAGS.values.flag_values_dict(),
            "versions": worker.versions(),
            "results": results,
        }
        with new_file(JSON.value) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())
    return int(any(r["status"] == "failed" for r in results))
